"""Evaluates a trained model on a data set, on any synchronous strategy.

Data set, held-out share, window and seed are those of the run in whose workdir the model lies, unless given.

python experiments/evaluate.py --model_file=runs/quickstart/model.keras --dataset=digits
"""

from __future__ import annotations

import dataclasses
import json

import tfpar
from tfpar.config import ConfigError, flags

from absl import flags as absl_flags

flags.define(sections=["input", "strategy", "precision", "train", "monitor"])
MODEL_FILE = absl_flags.DEFINE_string("model_file", "", "The .keras file to evaluate.")
SPLIT = absl_flags.DEFINE_enum("split", "validation", ["train", "validation"], "Which examples.")


def main(_: list[str]) -> None:
    import keras  # here, so that --help and a wrong flag need not wait for TensorFlow

    config = flags.experiment_config()
    if not MODEL_FILE.value:
        raise ConfigError("--model_file is missing: name a .keras file, e.g. --model_file=runs/quickstart/model.keras.")
    config = tfpar.examples_of_run(config, MODEL_FILE.value, flags.is_given)
    # A batch that the replicas cannot divide costs an evaluation nothing but padding.
    config = dataclasses.replace(config, input=dataclasses.replace(config.input, uneven_batches=True))
    tfpar.validate(config)
    tfpar.check_model_file(MODEL_FILE.value)
    source = tfpar.inputs.build_source(config.input, SPLIT.value, config.train.seed)
    runtime = tfpar.initialize(config)
    trainer = tfpar.Trainer(
        lambda: tfpar.load_model(MODEL_FILE.value, tfpar.task_spec(source)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            *([tfpar.models.BitsPerByte()] if source.info.task == tfpar.inputs.LANGUAGE_MODEL else []),
        ],
        config=config,
        runtime=runtime,
    )
    results = trainer.evaluate(source)
    if runtime.topology.is_chief:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    flags.run(main)

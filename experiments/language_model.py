r"""Trains a byte-level language model.

By default on the sources of the installed Python standard library, which every machine has; files are held out whole
for validation. The figure to watch is bits per byte.

  python experiments/language_model.py --workdir=runs/bytes
  python -m tfpar.launch --workers=2 -- experiments/language_model.py \
    --flagfile=experiments/recipes/language_model.flags
"""

from __future__ import annotations

import tfpar
from tfpar.config import flags

flags.define(
    defaults={
        "dataset": "text",
        "model": "transformer_lm_tiny",
        "steps": 1000,
        "optimizer": "muon",
        "learning_rate": 2e-2,
        "warmup_steps": 50,
        "clip_norm": 1.0,
        "weight_decay": 0.1,
        "validation_fraction": 0.05,
    }
)


def main(_: list[str]) -> None:
    import keras  # here, so that --help and a wrong flag need not wait for TensorFlow

    config = flags.experiment_config()
    tfpar.validate(config)
    train, validation = tfpar.inputs.build_splits(config.input, config.train.seed)
    runtime = tfpar.initialize(config, train, validation)
    trainer = tfpar.Trainer(
        lambda: tfpar.models.build(config.model.model, tfpar.task_spec(train), **config.model.arguments()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            tfpar.models.BitsPerByte(),
        ],
        config=config,
        runtime=runtime,
    )
    trainer.fit(train, validation=validation)


if __name__ == "__main__":
    flags.run(main)

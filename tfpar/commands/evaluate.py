"""Evaluates a trained model on a data set, on any synchronous strategy.

Data set, held-out share, window and seed are by default those of the run in whose workdir the model is. A policy of
reinforcement learning plays 100 episodes on one device, as with `tfpar play`; of the options, only the seed is for it.

  tfpar evaluate --model_file=runs/quickstart/model.keras
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence

import tfpar
from tfpar import cluster
from tfpar.checkpoint.keras_file import gives_probabilities
from tfpar.commands import play
from tfpar.config import ConfigError, StrategyConfig, catalog, flags

from absl import flags as absl_flags

_EPISODES = 100
# Those of training have no effect.
_OPTIONS = (
    *("dataset", "data_dir", "global_batch_size", "sequence_length", "validation_fraction", "image_size", "resize"),
    *("crop", "cache", "on_bad_record", "prefetch", "input_threads", "data_service"),
    *(field.name for field in dataclasses.fields(StrategyConfig) if field.name != "pipeline_schedule"),
    *("precision", "tf32", "loss_weighting", "jit_compile", "shard", "eval_batch_size", "eval_steps", "seed"),
    *("deterministic", "verbose", "tensorflow_log"),
)
_OF_POLICY = ("seed", "verbose", "tensorflow_log")


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, evaluates, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    flags.define(sections=["input", "strategy", "precision", "train", "monitor"], options=_OPTIONS)
    absl_flags.DEFINE_string("model_file", "", "The .keras file to evaluate.")
    absl_flags.DEFINE_enum("split", "validation", ["train", "validation"], "Which examples.")
    flags.run(main, argv, program=program)


def main(_: list[str]) -> None:
    config, given = flags.experiment_config(), absl_flags.FLAGS
    if not given.model_file:
        raise ConfigError("--model_file is missing: name a .keras file, e.g. --model_file=runs/quickstart/model.keras.")
    if config.train.shard not in ("none", "weights"):
        raise ConfigError(
            f"--shard={config.train.shard} has no effect in an evaluation, which has no optimizer and no gradients. "
            "Use --shard=weights to divide the weights among the replicas, or leave it out."
        )
    tfpar.check_model_file(given.model_file)
    if env := play.trained_in(given.model_file):
        play.check_options(given.model_file, {*_OPTIONS, "split"}.difference(_OF_POLICY))
        workers = cluster.detect()
        if workers is None or workers.is_chief:
            play.play_file(given.model_file, env, episodes=_EPISODES, seed=config.train.seed)
        return
    catalog.check_built_in(config)
    import keras  # here, so that --help and a wrong flag need not wait for TensorFlow

    with contextlib.redirect_stdout(sys.stderr):  # so that standard output is the result alone
        config = tfpar.examples_of_run(config, given.model_file, flags.is_given)
        # A batch that is not divisible by the number of replicas only costs an evaluation some padding.
        config = dataclasses.replace(config, input=dataclasses.replace(config.input, uneven_batches=True))
        tfpar.validate(config)
        source = tfpar.inputs.build_source(config.input, given.split, config.train.seed)
        runtime = tfpar.initialize(config)
        from_logits = not gives_probabilities(given.model_file)
        of_bytes = source.info.task == tfpar.inputs.LANGUAGE_MODEL
        trainer = tfpar.Trainer(
            lambda: tfpar.load_model(given.model_file, tfpar.task_spec(source)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits),
            metrics=[
                keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
                *([tfpar.models.BitsPerByte(from_logits=from_logits)] if of_bytes else []),
            ],
            config=config,
            runtime=runtime,
        )
        results = trainer.evaluate(source, steps=config.train.eval_steps)
    if runtime.topology.is_chief:
        print(json.dumps(results, indent=2))

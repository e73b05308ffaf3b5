r"""Trains a byte-level language model.

By default on the sources of the installed Python standard library, which every machine has; files are held out whole
for validation. The figure to watch is bits per byte. The default of --learning_rate suits Muon; with another
--optimizer it is 0.001.

  tfpar train language --workdir=runs/bytes
  tfpar launch --workers=2 -- tfpar train language --flagfile=language_model.flags --workdir=runs/bytes
"""

from __future__ import annotations

from collections.abc import Sequence

import tfpar
from tfpar.config import catalog, flags

_DEFAULTS = {
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


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, trains, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    flags.define(defaults=_DEFAULTS)
    flags.run(main, argv, program=program)


def main(_: list[str]) -> None:
    config = flags.experiment_config(preset=flags.for_optimizer("muon", "learning_rate"))
    catalog.check_built_in(config)
    import keras  # here, so that --help and a wrong flag need not wait for TensorFlow

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

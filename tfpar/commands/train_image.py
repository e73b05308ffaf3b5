r"""Trains an image classifier.

tfpar train image --dataset=digits --model=convnet --epochs=20 --workdir=runs/digits
tfpar launch --workers=2 -- tfpar train image --flagfile=quickstart.flags --workdir=runs/quickstart
"""

from __future__ import annotations

from collections.abc import Sequence

import tfpar
from tfpar.config import catalog, flags


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, trains, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    flags.define(defaults={"dataset": "digits", "model": "convnet", "epochs": 10.0})
    flags.run(main, argv, program=program)


def main(_: list[str]) -> None:
    config = flags.experiment_config()
    catalog.check_built_in(config)
    import keras  # here, so that --help and a wrong flag need not wait for TensorFlow

    tfpar.validate(config)
    train, validation = tfpar.inputs.build_splits(config.input, config.train.seed)
    runtime = tfpar.initialize(config, train, validation)
    trainer = tfpar.Trainer(
        lambda: tfpar.models.build(config.model.model, tfpar.task_spec(train), **config.model.arguments()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        config=config,
        runtime=runtime,
    )
    trainer.fit(train, validation=validation)

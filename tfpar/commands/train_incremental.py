r"""Learns tasks one after the other, and measures forgetting; or learns from files as they arrive.

tfpar train incremental --dataset=digits --tasks=by_class:2 --method=replay --workdir=runs/tasks
tfpar launch --workers=2 -- tfpar train incremental --method=ewc --exchange=int8 --workdir=runs/tasks

--epochs or --steps is the length of one task. Started again, it continues with the current task.

tfpar train incremental --watch=incoming --dataset=images:flowers --warm_start=runs/flowers --schedule=constant \
    --workdir=runs/online

The model learns from each file that arrives in incoming/ exactly once; a file incoming/STOP ends the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tfpar
from tfpar.config import SECTIONS, catalog, flags

if TYPE_CHECKING:
    import keras


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, learns, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    defaults = {"dataset": "digits", "model": "mlp", "epochs": 20.0}
    flags.define(sections=("incremental", *SECTIONS), defaults=defaults)
    flags.run(main, argv, program=program)


def main(_: list[str]) -> None:
    config = flags.experiment_config()
    catalog.check_built_in(config)
    watches = bool(config.incremental and config.incremental.watch)
    for name in ("epochs", "steps"):
        if watches and flags.is_given(name) and (value := getattr(config.train, name)):
            raise tfpar.ConfigError(
                f"--{name}={value:g} has no effect, because --watch learns from each example once, until there is a "
                "file STOP or --idle_seconds are over. Leave it out."
            )
    # Here, so that --help and a wrong flag need not wait for TensorFlow.
    from tfpar.incremental import IncrementalLearner, OnlineLearner, check, watching

    config = watching(config)
    tfpar.validate(config)
    check(config)
    train, validation = tfpar.inputs.build_splits(config.input, config.train.seed)
    runtime = tfpar.initialize(config, train, validation)

    def build(classes: int = train.info.num_classes) -> keras.Model:
        spec = dataclasses.replace(tfpar.task_spec(train), num_classes=classes)
        return tfpar.models.build(config.model.model, spec, **config.model.arguments())

    if watches:
        OnlineLearner(build, train, validation, config=config, runtime=runtime).learn()
        return
    if validation is None:
        raise tfpar.ConfigError(
            f"--dataset={config.input.dataset} has no validation examples, on which tasks are evaluated. Hold some "
            "out: --validation_fraction=0.1."
        )
    IncrementalLearner(build, train, validation, config=config, runtime=runtime).learn()

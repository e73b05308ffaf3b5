r"""Trains an image classifier on a population of clients, by federated averaging.

tfpar train federated --dataset=digits --partition=dirichlet:0.1 --clients=100 --clients_per_round=10 --rounds=200 \
    --workdir=runs/clients
tfpar launch --workers=2 -- tfpar train federated --averaging=scaffold --workdir=runs/scaffold
tfpar train federated --client_sampling=poisson --client_clip=1 --noise_multiplier=1 --workdir=runs/private

--rounds says how long the run is. --optimizer, --learning_rate and --schedule are those of the clients' steps; a step
of the schedule is a round. The default of --learning_rate suits plain SGD; with another --optimizer it is 0.001.
--exchange is between workers, --update_codec between clients and server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tfpar
from tfpar.config import SECTIONS, catalog, flags


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, trains, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    defaults: dict[str, Any] = {"dataset": "digits", "model": "mlp", "partition": "dirichlet:0.1"}
    defaults |= {"optimizer": "sgd", "optimizer_args": "momentum=0", "learning_rate": 0.1, "schedule": "constant"}
    flags.define(sections=("federated", *SECTIONS), defaults=defaults)
    flags.run(main, argv, program=program)


def main(_: list[str]) -> None:
    config = flags.experiment_config(preset=flags.for_optimizer("sgd", "learning_rate", "optimizer_args"))
    catalog.check_built_in(config)
    # Here, so that --help and a wrong flag need not wait for TensorFlow.
    from tfpar.outer.federated import FederatedTrainer, check, complete

    import keras

    config = complete(config)
    tfpar.validate(config)
    check(config)
    train, validation = tfpar.inputs.build_splits(config.input, config.train.seed)
    runtime = tfpar.initialize(config, train, validation)
    trainer = FederatedTrainer(
        lambda: tfpar.models.build(config.model.model, tfpar.task_spec(train), **config.model.arguments()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        config=config,
        runtime=runtime,
    )
    trainer.fit(train, validation=validation)

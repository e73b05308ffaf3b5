"""The rounds of a program."""

from __future__ import annotations

from typing import Any

from tfpar import models
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import Exchange
from tfpar.optim.keras_internals import is_seed_state
from tfpar.outer.local import AnyRounds, FragmentExchange, Parts, Rounds, Streaming
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.topology import Topology
from tfpar.training.core import Core
from tfpar.training.model.adapting import frozen_weights
from tfpar.training.model.building import is_usable_as_it_is
from tfpar.training.sidecar import Sidecar

import keras
import tensorflow as tf


def build_rounds(
    config: ExperimentConfig,
    topology: Topology,
    strategy: tf.distribute.Strategy,
    core: Core,
    optimizer: keras.optimizers.Optimizer,
    exchange: Exchange,
) -> AnyRounds | None:
    """The rounds that `--local_steps` asks for; None where gradients are exchanged in every step.

    All workers call it at the same point, because it creates variables under the strategy.

    Args:
      config: The experiment.
      topology: Its workers, replicas and devices.
      strategy: The running strategy.
      core: The model and its objective.
      optimizer: The optimizer of the local steps, built.
      exchange: The exchange of the rounds, built.

    Raises:
      ConfigError: A model or an optimizer that cannot have local steps.
    """
    if not config.outer.uses_rounds:
        return None
    _check_built(f"--local_steps={config.outer.local_steps}", topology, core, optimizer)
    model = core.model
    frozen, others = frozen_weights(model), model.non_trainable_variables
    averaged = Sidecar.of(others, [], 2, frozen).averaged  # as for two replicas, even if there is one
    constant = {id(weight) for weight in frozen}
    state, kept = [], []
    for variable, is_averaged in zip(others, averaged, strict=True):
        if is_averaged:
            state.append(variable)
        elif not is_seed_state(variable) and id(variable) not in constant:
            kept.append(variable)
    variables = config.outer, model.trainable_variables, state, kept
    where: dict[str, Any] = {"strategy": strategy, "worker": topology.data_worker, "workers": topology.data_workers}
    where["parts"] = Parts(
        programs=len(strategy.extended.worker_devices) // topology.local_replicas,
        peers=ReplicaPeers.of_replica(topology, "a round of local steps"),
        counts_whole=topology.model_part == 0,
        own_variables=topology.pipeline_spans_workers or is_usable_as_it_is(model, strategy),
    )
    if isinstance(exchange, FragmentExchange):
        return Streaming(*variables, inner=optimizer, exchange=exchange, **where)
    return Rounds(*variables, inner=optimizer, exchange=exchange, **where)


def _check_built(flag: str, topology: Topology, core: Core, optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses a model or an optimizer that does not work with local steps, which is known once both are built."""
    if optimizer.use_ema:
        raise ConfigError(
            f"use_ema=True of the optimizer does not work with {flag}: its averages would be of weights that this "
            "worker alone has. Leave one of them out."
        )
    if topology.data_workers > 1 and models.uses_synchronized_statistics(core.model):
        raise ConfigError(
            f"{flag}: the model synchronises batch statistics between the replicas of all workers in every step. Use "
            "--model_args=normalization=batch (tfpar.models.BatchNormalization(synchronized=False)), whose statistics "
            "are averaged at the end of a round."
        )
    if core.overwritten:
        raise ConfigError(
            f"{flag} does not work with layers that overwrite weights with their gradient, as those of float8 do. Use "
            "--precision=mixed_bfloat16, or --local_steps=1."
        )

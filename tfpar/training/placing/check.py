"""Refuses options that do not work on the devices and workers of a run, before anything starts."""

from __future__ import annotations

import dataclasses

from tfpar import precision
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange.sharding.check import check_sharding
from tfpar.optim import optimizers
from tfpar.parallel.mesh import check_beside_mesh
from tfpar.parallel.topology import Topology
from tfpar.training.local_steps.check import check_local_steps
from tfpar.training.offload.check import check_offload
from tfpar.training.segments.check import check_segments


def check_on_topology(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses options that do not work on these devices and workers.

    Raises:
      ConfigError: The first of them, with what to use instead.
    """
    _check_idle(config)
    check_beside_mesh(config, topology.mesh)
    check_sharding(config, topology)
    check_local_steps(config, topology)
    check_segments(config, topology)
    check_offload(config, topology)
    _check_whole_tensors(config, topology)


def _check_idle(config: ExperimentConfig) -> None:
    """Refuses options of the exchange and the precision that have no effect beside the others."""
    every, exchange = config.exchange.exchange_retune_every, config.exchange.exchange
    if every and exchange.partition(":")[0] != "auto":
        raise ConfigError(
            f"--exchange_retune_every={every} has no effect with --exchange={exchange}, which measures nothing. Use "
            "--exchange=auto, or leave it out."
        )
    chosen = config.precision
    if precision.uses_loss_scale(chosen.precision):
        return
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        if field.name in ("initial_loss_scale", "loss_scale_growth_steps") and value != field.default:
            raise ConfigError(
                f"--{field.name}={value:g} has no effect with --precision={chosen.precision}, which needs no loss "
                "scale. Use --precision=mixed_float16, or leave it out."
            )


def _check_whole_tensors(config: ExperimentConfig, topology: Topology) -> None:
    """Refuses early, by name, an optimizer that the trainer would refuse once it is built."""
    name = config.optimizer.optimizer
    # The owner of a shard of the state has whole tensors, or those that have the parts put them together: the devices
    # of a model axis, or the replicas, not both.
    sharded = config.train.shard == "weights" and topology.replicas > 1
    if name in optimizers.NEEDS_WHOLE and sharded and topology.model_devices > 1:
        raise ConfigError(
            f"--optimizer={name} needs whole tensors, which --shard=weights divides among replicas, and "
            f"--mesh={config.strategy.mesh} over their devices. Use an elementwise optimizer, such as adamw, or "
            "--shard=gradients."
        )

"""Replicas that share the weights, each with a part (`--shard=weights`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

from tfpar import models
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange import spec as specs
from tfpar.exchange.reducer import GatheredWeights
from tfpar.optim import keras_internals
from tfpar.optim.optimizers import ELEMENTWISE
from tfpar.parallel import strategies
from tfpar.parallel.division import FlatSplit
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.split import move_to_devices, split_of
from tfpar.training.core import Core
from tfpar.training.model.recompute import recompute_layers
from tfpar.training.model.support import known_summary
from tfpar.training.placing.base import Placing
from tfpar.training.sharding.weights_step import GatheringStep, whole_places
from tfpar.training.step import TrainStep

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)

_NO_XLA = "--shard=weights gathers weights within a step, for which TensorFlow has no XLA kernel on CPUs"


class GatheringPlacing(Placing):
    """Every replica has one device, and a part of each large weight.

    Args:
      runtime: The running strategy.
    """

    several = True

    def __init__(self, runtime: strategies.Runtime) -> None:
        topology = runtime.topology
        self.topology = dataclasses.replace(topology, shards_weights=True)
        devices = runtime.strategy.extended.worker_devices
        self._axis = ModelAxis([[device] for device in devices], max(topology.worker, 0), topology.replicas)
        self._peers = None
        if topology.workers > 1:
            group = world_group(topology.workers, topology.worker)
            self._peers = ReplicaPeers(topology.worker, WorkerAgreement(group))

    def place(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> models.ModelSummary | None:
        """See `Placing`."""
        _check_model(model)
        summary = known_summary(model)
        units = layers_that_gather(model)
        sharded = {id(variable) for layer in units for variable in layer.trainable_variables if is_sharded(variable)}
        recompute_layers(model, [layer for layer in units if any(id(each) in sharded for each in layer.variables)])
        if announced:
            _log.info("%s", self._describe(model, sharded))
        for variable in model.variables:
            shape = tuple(variable.shape)
            split = FlatSplit(shape, self._axis.size) if id(variable) in sharded else None
            move_to_devices(variable, split, peers=self._peers)
        return summary

    def check(self, optimizer: keras.optimizers.Optimizer, core: Core) -> None:
        """See `Placing`."""
        if core.overwritten:
            raise ConfigError(
                f"--shard=weights: model {core.model.name!r} has float8 layers, whose statistics cover whole tensors. "
                "Use --shard=gradients."
            )
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(sorted(kind.__name__.lower() for kind in ELEMENTWISE))
            raise ConfigError(
                f"--shard=weights: {type(optimizer).__name__} needs whole tensors, which no replica has. Use an "
                f"elementwise optimizer ({names}), or --shard=gradients."
            )
        if optimizer.clipnorm or optimizer.global_clipnorm:
            raise ConfigError(
                f"--shard=weights: clipnorm and global_clipnorm of {type(optimizer).__name__} would apply to the part "
                "of one replica. Leave them out; --clip_norm clips by the norm of the whole gradient."
            )

    def within(self) -> contextlib.AbstractContextManager[Any]:
        """See `Placing`."""
        return self._axis.on_own_device()

    def step_class(self, model: keras.Model) -> Callable[..., TrainStep]:
        """See `Placing`."""
        del model
        return functools.partial(GatheringStep, self._axis)

    def exchange_arguments(self, model: keras.Model) -> dict[str, Any]:
        """See `Placing`."""
        variables = model.trainable_variables
        return {"variables": [variables[place] for place in whole_places(variables)]}

    def gathered(self, model: keras.Model, config: ExperimentConfig) -> GatheredWeights:
        """See `Placing`."""
        parts = [variable.shape[0] for variable in model.trainable_variables if split_of(variable)]
        return GatheredWeights(self._axis.size * sum(parts), config.train.accumulate_steps)

    @property
    def xla_obstacle(self) -> str:
        """See `Placing`."""
        return _NO_XLA

    def _describe(self, model: keras.Model, sharded: set[int]) -> str:
        weights = model.trainable_variables
        every = sum(math.prod(variable.shape) for variable in weights)
        inside = sum(math.prod(variable.shape) for variable in weights if id(variable) in sharded)
        own = every - inside + -(-inside // self._axis.size)
        return (
            f"sharded weights: each of {self._axis.size} replicas keeps {own:,} of {every:,} trainable weights "
            f"({own / max(every, 1):.0%}), with their gradients and optimizer state"
        )


def layers_that_gather(model: keras.Model) -> list[keras.layers.Layer]:
    """The outermost layers that are not models: each gathers its weights when it is called."""
    found = []
    for layer in keras_internals.all_layers(model, include_self=False, recursive=False):
        found += layers_that_gather(layer) if isinstance(layer, keras.Model) else [layer]
    return found


def is_sharded(variable: keras.Variable) -> bool:
    """Whether a trainable variable can be sharded and is large enough: at least 1,024 elements and two dimensions."""
    large = specs.parse("none").options.is_compressible(tf.TensorShape(variable.shape))
    return large and variable.dtype == "float32" and variable.constraint is None


def _check_model(model: keras.Model) -> None:
    if models.uses_synchronized_statistics(model):
        raise ConfigError(
            f"--shard=weights: model {model.name!r} synchronises batch statistics between replicas, which the "
            "backward pass, where layers run again, cannot repeat. Use another normalization, or --shard=gradients."
        )

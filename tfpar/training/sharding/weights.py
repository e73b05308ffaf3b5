"""Replicas that share the weights, each with a shard (`--shard=weights`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar import models
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.exchange.reducer import GatheredWeights
from tfpar.optim.optimizers import ELEMENTWISE, WHOLE_TENSORS
from tfpar.parallel import strategies
from tfpar.parallel.division import Shards, Split
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.split import move_to_devices
from tfpar.parallel.tensor.calls import heads_of
from tfpar.parallel.topology import Topology
from tfpar.parallel.weight_shards import ReplicaAxis, can_be_sharded, is_sharded, layers_that_gather
from tfpar.training.core import Core
from tfpar.training.model.adapting import all_weights
from tfpar.training.model.recompute import recompute_layers
from tfpar.training.model.support import known_summary
from tfpar.training.placing.base import Placing
from tfpar.training.placing.model_methods import adapt_methods
from tfpar.training.sharding.weights_step import DividedGatheringStep, GatheringStep, exchanged_places
from tfpar.training.step import TrainStep
from tfpar.training.tensor_parallel import DividedPlacing

import keras

_log = logging.getLogger(__name__)

_MOST_PADDED = 2.0  # a weight of which replicas would keep as many times its elements is not sharded

_NO_XLA = "--shard=weights gathers weights within a step, for which TensorFlow has no XLA kernel on CPUs"


class GatheringPlacing(Placing):
    """Every replica has one device, and a shard of each large weight.

    Args:
      runtime: The running strategy.
    """

    several = True

    def __init__(self, runtime: strategies.Runtime) -> None:
        topology = runtime.topology
        self.topology: Topology = dataclasses.replace(topology, shards_weights=True)
        worker, devices = max(topology.worker, 0), runtime.strategy.extended.worker_devices
        self._replica_axis = ReplicaAxis(devices, worker, topology.replicas, topology.model_devices)
        self._peers = None
        if topology.workers > 1:
            group = world_group(topology.workers, topology.worker)
            self._peers = ReplicaPeers(topology.worker, WorkerAgreement(group))

    def place(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> models.ModelSummary | None:
        """See `Placing`."""
        _check_model(model)
        summary = known_summary(model)
        self._shard(model, {}, layers_that_gather(model), announced=announced)
        return summary

    def check(self, optimizer: keras.optimizers.Optimizer, core: Core) -> None:
        """See `Placing`."""
        if core.overwritten:
            raise ConfigError(
                f"--shard=weights: model {core.model.name!r} has float8 layers, whose statistics cover whole tensors. "
                "Use --shard=gradients."
            )
        if type(optimizer) not in (*ELEMENTWISE, *WHOLE_TENSORS):
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
        self._exchanges_in_update = type(optimizer) not in ELEMENTWISE

    def within(self) -> contextlib.AbstractContextManager[Any]:
        """See `Placing`."""
        return self._replica_axis.on_own_device()

    def step_class(self, model: keras.Model) -> Callable[..., TrainStep]:
        """See `Placing`."""
        del model
        return functools.partial(GatheringStep, self._replica_axis)

    def exchange_arguments(self, model: keras.Model) -> dict[str, Any]:
        """See `Placing`."""
        variables = model.trainable_variables
        return {"variables": [variables[place] for place in exchanged_places(variables)]}

    def gathered(self, model: keras.Model, config: ExperimentConfig) -> GatheredWeights:
        """See `Placing`."""
        axis = self._replica_axis
        devices = min(axis.devices_of_replica, axis.programs)
        trained, frozen = (
            axis.size * devices * sum(math.prod(variable.shape) for variable in variables if is_sharded(variable))
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        sent = devices * axis.bytes_of_step
        return GatheredWeights(trained, config.train.accumulate_steps, frozen, sent)

    @property
    def xla_obstacle(self) -> str:
        """See `Placing`."""
        return _NO_XLA

    def _shard(
        self,
        model: keras.Model,
        divided: Mapping[int, Split],
        blocks: Sequence[keras.layers.Layer],
        *,
        announced: bool,
    ) -> None:
        """Moves the parts of a model to their devices.

        Args:
          model: The model.
          divided: Divisions over a model axis, by `id` of the variable.
          blocks: Layers that may run again in the backward pass, so that their weights are not kept until then.
          announced: Whether to log how much a device keeps.
        """
        axis, weights = self._replica_axis, all_weights(model)
        splits: dict[int, Split | Shards] = dict(divided)
        for variable in weights:
            if can_be_sharded(variable):
                devices, within = axis.devices_of_replica, divided.get(id(variable))
                shards = Shards.of(variable.shape, axis.size, devices, within)
                if shards.padded_share < _MOST_PADDED:
                    splits[id(variable)] = shards
        sharded = {key for key, split in splits.items() if isinstance(split, Shards)}
        recompute_layers(model, [layer for layer in blocks if any(id(each) in sharded for each in layer.variables)])
        if announced:
            every = sum(math.prod(variable.shape) for variable in weights)
            parts = [(tuple(variable.shape), splits.get(id(variable))) for variable in weights]
            own = sum(math.prod(split.part_shape(shape) if split else shape) for shape, split in parts)
            _log.info(
                "sharded weights: each of %d replicas keeps %s of %s weights (%.0f%%)%s, with their gradients and "
                "optimizer state",
                *(axis.size, f"{own:,}", f"{every:,}", 100 * own / max(every, 1)),
                " on each of its devices" if axis.devices_of_replica > 1 else "",
            )
        for variable in model.variables:
            split = splits.get(id(variable))
            # Only if a worker has not all devices of a replica, it has not all parts of a variable without shards.
            shared = isinstance(split, Shards) or axis.programs < axis.devices_of_replica
            move_to_devices(variable, split, peers=self._peers if shared else None)
        adapt_methods(model)


class DividedGatheringPlacing(DividedPlacing, GatheringPlacing):
    """The devices of the model axis hold a replica; each has shards of its parts of the weights.

    Args:
      runtime: The running strategy.
      layout: How layers are divided, see `find_layout`.
    """

    _deals_out = False

    def __init__(self, runtime: strategies.Runtime, layout: Mapping[str, Any] | None) -> None:
        DividedPlacing.__init__(self, runtime, layout)
        GatheringPlacing.__init__(self, runtime)  # which knows more of the topology, and of who shares weights

    def place(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> models.ModelSummary | None:
        """See `Placing`."""
        _check_model(model)
        summary, heads = known_summary(model), heads_of(model)
        divided = self._divided(model, config, announced=announced)
        # A head returns logits that are divided, which no block can; it is also the first that the backward pass needs.
        blocks = [layer for layer in layers_that_gather(model) if id(layer) not in heads]
        self._shard(model, divided, blocks, announced=announced)
        return summary

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """See `Placing`."""
        with self._axis.on_own_device(), self._replica_axis.on_own_device():
            yield

    def step_class(self, model: keras.Model) -> Callable[..., TrainStep]:
        """See `Placing`."""
        del model
        return functools.partial(DividedGatheringStep, self._replica_axis, self._axis)

    def exchange_arguments(self, model: keras.Model) -> dict[str, Any]:
        """See `Placing`."""
        arguments = super().exchange_arguments(model)
        return arguments | {"per_device": self._places_of(arguments["variables"])}


def _check_model(model: keras.Model) -> None:
    if models.uses_synchronized_statistics(model):
        raise ConfigError(
            f"--shard=weights: model {model.name!r} synchronises batch statistics between replicas, which the "
            "backward pass, where layers run again, cannot repeat. Use another normalization, or --shard=gradients."
        )

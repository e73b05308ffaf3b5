"""Replicas whose layers are divided over several devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar import models
from tfpar.config import ExperimentConfig
from tfpar.exchange import DevicesOfReplica, places_of_part, places_that_divide
from tfpar.optim.optimizers import ELEMENTWISE
from tfpar.parallel import strategies
from tfpar.parallel.division import Split
from tfpar.parallel.mesh import COLLECTIVES_WITHIN
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.split import model_split_of, move_to_devices
from tfpar.parallel.topology import Topology
from tfpar.training.core import Core
from tfpar.training.model.support import known_summary
from tfpar.training.placing.base import Placing
from tfpar.training.placing.model_methods import adapt_methods
from tfpar.training.step import TrainStep
from tfpar.training.tensor_parallel.model import check_divided, divide_layers
from tfpar.training.tensor_parallel.step import DividedStep

import keras


class DividedPlacing(Placing):
    """The devices of the model axis hold a replica.

    Args:
      runtime: The running strategy.
      layout: How layers are divided, see `find_layout`.
    """

    several = True
    _deals_out = True  # see `check_divided`

    def __init__(self, runtime: strategies.Runtime, layout: Mapping[str, Any] | None) -> None:
        self.topology: Topology = runtime.topology
        topology = self.topology
        devices = runtime.strategy.extended.worker_devices
        self._axis = ModelAxis([[device] for device in devices], max(topology.worker, 0), topology.model_devices)
        self._layout, self._peers = layout, ReplicaPeers.of_layers(topology)
        self.has_outputs = self.adds_sums = topology.replica_part == 0

    def place(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> models.ModelSummary | None:
        """See `Placing`."""
        summary = known_summary(model)
        splits = self._divided(model, config, announced=announced)
        for variable in model.variables:
            move_to_devices(variable, splits.get(id(variable)), peers=self._peers)
        adapt_methods(model)
        return summary

    def check(self, optimizer: keras.optimizers.Optimizer, core: Core) -> None:
        """See `Placing`."""
        check_divided(optimizer, core, deals_out=self._deals_out)
        self._exchanges_in_update = type(optimizer) not in ELEMENTWISE

    def within(self) -> contextlib.AbstractContextManager[Any]:
        """See `Placing`."""
        return self._axis.on_own_device()

    def step_class(self, model: keras.Model) -> Callable[..., TrainStep]:
        """See `Placing`."""
        del model
        return functools.partial(DividedStep, self._axis)

    def exchanged(self, model: keras.Model) -> DevicesOfReplica | None:
        """See `Placing`."""
        return self._places_of(model.trainable_variables)

    @property
    def model_axis_bytes(self) -> int:
        """See `Placing`."""
        return self._axis.bytes_of_step

    @property
    def xla_obstacle(self) -> str:
        """See `Placing`."""
        return COLLECTIVES_WITHIN

    def _divided(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> dict[int, Split]:
        """See `divide_layers`."""
        sequence_parallel = config.strategy.sequence_parallel
        return divide_layers(model, self._axis, self._layout, sequence_parallel=sequence_parallel, announced=announced)

    def _places_of(self, variables: Sequence[keras.Variable]) -> DevicesOfReplica:
        """How the devices of a replica divide the gradients of these variables."""
        axis, topology = self._axis, self.topology
        divided = [index for index, variable in enumerate(variables) if model_split_of(variable)]
        if topology.model_workers > 1:
            return places_of_part(divided, len(variables), axis.programs, topology.model_workers, topology.model_part)
        return places_that_divide(divided, len(variables), axis.size)

"""Replicas whose layers are on several devices, one after the other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar import models
from tfpar.config import ExperimentConfig
from tfpar.exchange import DevicesOfReplica, places_in_turn
from tfpar.parallel import strategies
from tfpar.parallel.held import held_by
from tfpar.parallel.mesh import COLLECTIVES_WITHIN
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.pipeline.devices import PipelineDevices, place_of
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.split import split_of
from tfpar.parallel.topology import Topology
from tfpar.training.core import Core
from tfpar.training.model.building import scope_of
from tfpar.training.model.support import known_summary
from tfpar.training.pipeline.between_workers import PipelineWorker
from tfpar.training.pipeline.model import check_pipeline, make_pipeline
from tfpar.training.pipeline.over_workers import DividedOverWorkersStep, OverWorkersCore, OverWorkersStep
from tfpar.training.pipeline.own_losses import check_loss_over_workers
from tfpar.training.pipeline.replica_sums import ReplicaSums
from tfpar.training.pipeline.stages import Pipeline
from tfpar.training.pipeline.step import DividedPipelineStep, PipelineCore, PipelineStep
from tfpar.training.placing.base import Placing
from tfpar.training.placing.model_methods import adapt_methods
from tfpar.training.step import TrainStep
from tfpar.training.tensor_parallel.model import check_divided

import keras
import tensorflow as tf


class PipelinePlacing(Placing):
    """The devices of the pipeline axis hold the stages of a replica; on a model axis, their layers are divided.

    Args:
      runtime: The running strategy.
      layout: How layers are divided, see `find_layout`.
      sharded: Whether the optimizer is built for a share of this worker's own weights. Otherwise it is built for all
        weights, of which those of other workers have no elements here.
    """

    several = True
    core_class = PipelineCore
    topology: Topology

    def __init__(self, runtime: strategies.Runtime, layout: Mapping[str, Any] | None, *, sharded: bool = False) -> None:
        self._sharded = sharded
        self.topology = topology = runtime.topology
        mesh = topology.mesh
        self._devices = PipelineDevices(runtime.strategy.extended.worker_devices, topology.local_places, mesh.model)
        self._worker = PipelineWorker.of(topology)
        self._layer_peers = ReplicaPeers.of_layers(topology)
        if self._worker:
            self.core_class = OverWorkersCore
            self.adds_sums = topology.model_part == 0
            self.has_outputs = self._worker.is_last and self.adds_sums
        rows = [self._devices.of_replica(program) for program in range(self._devices.replicas)]
        self._axis = ModelAxis(rows, max(topology.worker, 0), mesh.model) if mesh.model > 1 else None
        self._layout = layout
        self._pipeline: Pipeline | None = None

    @contextlib.contextmanager
    def scope(self, model: keras.Model | Callable[[], keras.Model], strategy: tf.distribute.Strategy) -> Iterator[None]:
        """See `Placing`."""
        if self._worker:
            with self._devices.creating_own(strategy):
                yield
        else:
            with self._devices.creating(), scope_of(model, strategy):
                yield

    def place(self, model: keras.Model, config: ExperimentConfig, *, announced: bool) -> models.ModelSummary | None:
        """See `Placing`."""
        summary = known_summary(model)
        synchronizes = self.topology.replicas > 1 and models.uses_synchronized_statistics(model)
        self._pipeline = make_pipeline(
            *(model, self._devices, config),
            axis=self._axis,
            rules=self._layout,
            worker=self._worker,
            layer_peers=self._layer_peers,
            sums=ReplicaSums(self._devices, self.topology) if synchronizes else None,
            announced=announced,
        )
        adapt_methods(model)
        return summary

    def check(self, optimizer: keras.optimizers.Optimizer, core: Core) -> None:
        """See `Placing`."""
        check_pipeline(core)
        if self._axis or (self._worker and not self._sharded):
            check_divided(optimizer, core)

    def check_loss(self, core: Core, input_spec: Any, label_spec: Any) -> None:
        """See `Placing`."""
        if self._worker:
            check_loss_over_workers(core.objective, input_spec, label_spec, last=self._worker.peers.size - 1)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """See `Placing`."""
        with self._stages.on_own_replica(), self._axis.on_own_device() if self._axis else contextlib.nullcontext():
            yield

    def step_class(self, model: keras.Model) -> Callable[..., TrainStep]:
        """See `Placing`."""
        if self._axis:
            divided = DividedOverWorkersStep if self._worker else DividedPipelineStep
            return functools.partial(divided, self._stages, _places(model), self._axis)
        return functools.partial(OverWorkersStep if self._worker else PipelineStep, self._stages, _places(model))

    def exchanged(self, model: keras.Model) -> DevicesOfReplica | None:
        """See `Placing`."""
        variables = model.trainable_variables
        if self._worker:
            return self._exchanged_by_worker(variables)
        divided = [index for index, variable in enumerate(variables) if split_of(variable)]
        programs = self._axis.size if self._axis else 1
        return places_in_turn(_places(model), [self._devices.of_replica(each) for each in range(programs)], divided)

    def _exchanged_by_worker(self, variables: Sequence[keras.Variable]) -> DevicesOfReplica:
        """The weights that this worker exchanges; weights that several workers hold are exchanged separately, so
        that all get the same result. Weights that are not divided are exchanged by the first program."""
        places: dict[tuple[int, int, tuple[int, ...], bool, int], list[int]] = {}
        if not any(held.here for variable in variables if (held := held_by(variable))):
            places[0, 0, (), False, -1] = []  # the sidecar travels without weights, too
        for program in range(self._devices.replicas):
            for index, variable in enumerate(variables):
                held, divided = held_by(variable), bool(split_of(variable))
                if held and held.here and (program == 0 or divided):
                    # Weights that are on the same device here may be on two of another worker.
                    alone = index if len(held.ranks) > 1 and self._devices.places > 1 else -1
                    place = program, place_of(variable) or 0, held.ranks, bool(self._layer_peers) and divided, alone
                    places.setdefault(place, []).append(index)
        names = [self._devices.of_replica(program)[place] for program, place, *_ in places]
        programs = [program for program, *_ in places]
        parts, part = self.topology.replica_workers, self.topology.replica_part
        return DevicesOfReplica(
            *([*places.values()], programs, names, parts, part),
            layer_parts=self.topology.model_workers,
            per_replica=self._devices.replicas,
            held_elsewhere=[number for number, (_, _, ranks, *_) in enumerate(places) if len(ranks) > 1],
        )

    def use_xla(self, compiles: bool) -> None:
        """See `Placing`. The forward and the backward pass of each stage are one program each."""
        self._stages.compiles = compiles

    @property
    def xla_obstacle(self) -> str:
        """See `Placing`."""
        return COLLECTIVES_WITHIN if self._axis else ""

    @property
    def can_compile_update(self) -> bool:
        """See `Placing`."""
        return self._devices.places == 1

    @property
    def _stages(self) -> Pipeline:
        assert self._pipeline is not None
        return self._pipeline


def _places(model: keras.Model) -> list[int]:
    return [place_of(variable) or 0 for variable in model.trainable_variables]

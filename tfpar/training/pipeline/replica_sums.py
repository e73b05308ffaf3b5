"""Sums of batch statistics over the replicas, from within a stage of one of them.

Replicas of one worker are traced in threads of MirroredStrategy, whose own all-reduce would run on the first device of
each replica. Here the devices that have the same place in different replicas are a collective group instead: a sum is
an operation of each device, without any switch between threads. All replicas trace and run the same passes in the same
order of dependencies, so that no two of them can wait for each other.
"""

from __future__ import annotations

import contextlib

from tfpar import models
from tfpar.collectives.replicas import summing_with
from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.parallel.model_axis import Place, place_of_group
from tfpar.parallel.pipeline.devices import PipelineDevices
from tfpar.parallel.topology import Topology
from tfpar.training.pipeline.stage_program import Stage

import keras
import tensorflow as tf


class ReplicaSums:
    """The devices of this worker, each with those that have the same stage, and part of it, in the other replicas.

    If a model axis divides the layers of a stage, its devices have equal statistics, and each sums them with the
    devices that have the same part.

    Args:
      devices: The devices of the pipelines on this worker.
      topology: The topology of the run.
    """

    def __init__(self, devices: PipelineDevices, topology: Topology) -> None:
        self._devices, self._topology = devices, topology
        programs = range(devices.replicas)
        self._places = [[self._place(program, place) for place in range(devices.places)] for program in programs]

    def in_stage(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """In this context `sum_over_replicas` sums over the devices that have a stage; for the current replica."""
        own = self._places[self._devices.own_replica()]
        return summing_with(own[stage.place % self._devices.places].sum)

    def _place(self, program: int, place: int) -> Place:
        worker, parts = max(self._topology.worker, 0), self._devices.replicas // self._topology.local_replicas
        members = [
            (rank, replica * parts + program % parts)
            for rank in self._topology.workers_alike
            for replica in range(self._topology.local_replicas)
        ]
        numbers = [self._number(rank, each, place) for rank, each in members]
        device = self._devices.of_replica(program)[place]
        return place_of_group(numbers, self._number(worker, program, place), device, [rank for rank, _ in members])

    def _number(self, worker: int, program: int, place: int) -> int:
        """The number of a device among those of all workers, as `ModelAxis` numbers them."""
        index = tf.DeviceSpec.from_string(self._devices.of_replica(program)[place]).device_index or 0
        return worker * self._devices.replicas * self._devices.places + index


def summing_nothing() -> contextlib.AbstractContextManager[None]:
    """In this context `sum_over_replicas` returns its argument: for one replica, and for traces that are never run."""
    return summing_with(lambda value: value)


def is_synchronized(stage: Stage) -> bool:
    """Whether a layer of a stage sums its batch statistics over the replicas."""
    layers = (step.operation for step in stage.steps if isinstance(step.operation, keras.layers.Layer))
    return any(map(models.uses_synchronized_statistics, layers))


def check_synchronized(model: keras.Model, mesh: str) -> None:
    """Refuses layers that sum their statistics by other means than `sum_over_replicas`.

    Args:
      model: A built model.
      mesh: `--mesh`, for errors.

    Raises:
      ConfigError: There is such a layer. Keras' own calls the strategy, which TensorFlow 2.21 refuses inside a stage
        (MirroredStrategy's `merge_call`), and which would sum over the workers of a pipeline, too.
    """
    for layer in keras_internals.all_layers(model):
        if getattr(layer, "synchronized", False) is True and not isinstance(layer, models.BatchNormalization):
            raise ConfigError(
                f"--mesh={mesh}: layer {layer.name!r} of model {model.name!r}, a {type(layer).__module__}."
                f"{type(layer).__qualname__}, synchronises batch statistics between replicas in a way that stages of a "
                "pipeline cannot. Use tfpar.models.BatchNormalization(synchronized=True), or --mesh=data:... alone."
            )

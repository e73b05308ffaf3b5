"""The training steps of a worker that trains by itself: its replicas exchange gradients, workers do not.

Workers that hold a replica between them train together, without the workers of other replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tfpar.collectives.tensorflow import world_group
from tfpar.exchange import DevicesOfReplica, Exchange
from tfpar.exchange.reducer import reduce_per_worker
from tfpar.training.core import Core
from tfpar.training.objective import Tensors
from tfpar.training.pipeline.over_workers import DividedOverWorkersStep, OverWorkersStep
from tfpar.training.pipeline.step import DividedPipelineStep, PipelineStep
from tfpar.training.step import TrainStep
from tfpar.training.tensor_parallel.step import DividedStep

import keras
import tensorflow as tf


class LocalStep(TrainStep):
    """A step that the replicas of this worker take together, without those of other workers.

    With one replica the whole step is one XLA program, as on one device.

    Args:
      core: See `TrainStep`.
      optimizer: See `TrainStep`.
      exchange: The exchange of the rounds, which a step does not use.
      strategy: See `TrainStep`.
      per_device: How the devices of a replica divide its weights, if they do.
      **options: See `TrainStep`.
    """

    def __init__(
        self,
        core: Core,
        optimizer: keras.optimizers.Optimizer,
        exchange: Exchange,
        strategy: tf.distribute.Strategy,
        *,
        per_device: DevicesOfReplica | None = None,
        **options: Any,
    ) -> None:
        del exchange
        device = strategy.extended.worker_devices[0]
        within = Exchange("none")
        alone = world_group(1, 0, device)
        within.build(core.model.trainable_variables, strategy=strategy, group=alone, per_device=per_device)
        self._device, self._parts = device, per_device.parts if per_device else 1
        super().__init__(core, optimizer, within, strategy, **options)

    @property
    def replicas(self) -> int:
        """Programs that move together, of this worker and those that share its replica: one for each device of the
        model axis of its replicas."""
        return len(self.strategy.extended.worker_devices) * self._parts

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        sums = self._denominators(params, state, batch)
        if self.replicas == 1:
            return sums
        return reduce_per_worker(lambda none, total: (list(none), total), self._device, [], sums)[1]


class LocalDividedStep(DividedStep, LocalStep):
    """A `LocalStep` of replicas whose layers are divided over devices of this worker, or of several."""


class LocalPipelineStep(PipelineStep, LocalStep):
    """A `LocalStep` of replicas that are pipelines of devices of this worker."""


class LocalDividedPipelineStep(DividedPipelineStep, LocalStep):
    """A `LocalStep` of pipelines whose layers are divided as well."""


class LocalOverWorkersStep(OverWorkersStep, LocalStep):
    """A `LocalStep` of a pipeline over several workers."""


class LocalDividedOverWorkersStep(DividedOverWorkersStep, LocalStep):
    """A `LocalStep` of a pipeline over several workers whose layers are divided as well."""


_LOCAL: Mapping[Any, type[LocalStep]] = {
    TrainStep: LocalStep,
    DividedStep: LocalDividedStep,
    PipelineStep: LocalPipelineStep,
    DividedPipelineStep: LocalDividedPipelineStep,
    OverWorkersStep: LocalOverWorkersStep,
    DividedOverWorkersStep: LocalDividedOverWorkersStep,
}


def local_step(step: Callable[..., TrainStep], per_device: DevicesOfReplica | None) -> Callable[..., LocalStep]:
    """The constructor of the step that a worker takes by itself; takes the arguments of `TrainStep`.

    Args:
      step: From `Placing.step_class`: the constructor of the step that all workers take together.
      per_device: From `Placing.exchanged`.
    """
    kind, arguments = (step.func, step.args) if isinstance(step, functools.partial) else (step, ())
    return functools.partial(_LOCAL[kind], *arguments, per_device=per_device)

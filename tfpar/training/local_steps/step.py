"""The training step of a worker that trains by itself: its replicas exchange gradients, workers do not."""

from __future__ import annotations

from typing import Any

from tfpar.collectives.tensorflow import world_group
from tfpar.exchange import Exchange
from tfpar.exchange.reducer import reduce_per_worker
from tfpar.training.core import Core
from tfpar.training.objective import Tensors
from tfpar.training.step import TrainStep

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
      **options: See `TrainStep`.
    """

    def __init__(
        self,
        core: Core,
        optimizer: keras.optimizers.Optimizer,
        exchange: Exchange,
        strategy: tf.distribute.Strategy,
        **options: Any,
    ) -> None:
        del exchange
        device = strategy.extended.worker_devices[0]
        within = Exchange("none")
        within.build(core.model.trainable_variables, strategy=strategy, group=world_group(1, 0, device))
        self._device = device
        super().__init__(core, optimizer, within, strategy, **options)

    @property
    def replicas(self) -> int:
        """Replicas of this worker."""
        return len(self.strategy.extended.worker_devices)

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        sums = self._denominators(params, state, batch)
        if self.replicas == 1:
            return sums
        return reduce_per_worker(lambda none, total: (list(none), total), self._device, [], sums)[1]

"""The training step of replicas that are several devices each.

The devices of a replica see the same examples and draw the same random numbers. What each computes of a divided weight
is its own; of everything else, they take one result, since the sums of their threads may differ in the last bit, and
copies that drift apart would be different models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tfpar.config import ConfigError
from tfpar.parallel import replica
from tfpar.parallel.model_axis import ModelAxis, Place
from tfpar.parallel.split import split_of
from tfpar.training.norms import l2_norm
from tfpar.training.objective import Tensors
from tfpar.training.step import TrainStep

import tensorflow as tf


class DividedStep(TrainStep):
    """A step of replicas whose weights are divided.

    Args:
      axis: The devices of this worker's replicas.
      *args: See `TrainStep`.
      **kwargs: See `TrainStep`.
    """

    def __init__(self, axis: ModelAxis, *args: Any, **kwargs: Any) -> None:
        self._axis = axis
        super().__init__(*args, **kwargs)
        variables = self.core.model.trainable_variables
        self._divided = [index for index, variable in enumerate(variables) if split_of(variable)]
        self._whole = [index for index, variable in enumerate(variables) if not split_of(variable)]

    def next_batch(self, iterator: Iterator[Any]) -> Any:
        """The next batch: all devices of a replica get the same."""
        return replica.next_batch(self.strategy, iterator, model_devices=self._axis.size)

    def _make_programs(self) -> None:
        super()._make_programs()
        self._norm: Callable[[Tensors], tf.Tensor] = self._whole_norm

    def _replica_number(self, context: tf.distribute.ReplicaContext) -> tf.Tensor:
        return tf.convert_to_tensor(context.replica_id_in_sync_group) // self._axis.size

    def _total_denominators(self, params: Tensors, state: Tensors, batch: Any) -> tf.Tensor:
        with self._axis.on_own_device():
            return self.exchange.sum_vector(self._denominators(params, state, batch))

    def _contribution(
        self,
        params: Tensors,
        state: Tensors,
        batch: Any,
        seed_path: tuple[tf.Tensor, tf.Tensor],
        scale: tf.Tensor,
        scales: tf.Tensor | None,
    ) -> tuple[Tensors, tf.Tensor, Tensors, dict[int, tf.Tensor]]:
        with self._axis.on_own_device() as place:
            gradients, packed, state, assigned = super()._contribution(params, state, batch, seed_path, scale, scales)
            if assigned:
                name = self.core.model.trainable_variables[min(assigned)].path
                raise ConfigError(
                    f"--mesh: the model assigns {name} in its forward pass (as SpectralNormalization does), which "
                    "divided models cannot do. Use --mesh=data:... alone."
                )
            gradients, packed = self._agreed(place, gradients, packed)
            return gradients, packed, state, assigned

    def _agreed(self, place: Place, gradients: Tensors, packed: tf.Tensor) -> tuple[Tensors, tf.Tensor]:
        """Gradients and sidecar, those of whole weights the same bits on every device: the mean of all; in one call."""
        own = packed if place.rank == 0 else tf.zeros_like(packed)
        parts = [tf.reshape(gradients[index], [-1]) / place.size for index in self._whole]
        sizes = [packed.shape[0], *(math.prod(gradients[index].shape) for index in self._whole)]
        packed, *means = tf.split(place.sum(tf.concat([own, *parts], axis=0)), sizes)
        for index, mean in zip(self._whole, means, strict=True):
            gradients[index] = tf.reshape(mean, gradients[index].shape)
        return gradients, packed

    def _whole_norm(self, gradients: Tensors) -> tf.Tensor:
        """The norm over all devices' parts, and once over what is whole; the same bits on each."""
        with self._axis.on_own_device() as place:
            # In float64, the square of no float32 overflows.
            divided = tf.cast(l2_norm([gradients[index] for index in self._divided]), tf.float64)
            squares = place.sum(tf.square(divided))
            if self._whole:
                squares += tf.square(tf.cast(l2_norm([gradients[index] for index in self._whole]), tf.float64))
        return tf.cast(tf.sqrt(squares), tf.float32)

    def _norm_if_needed(self, gradients: Tensors, is_last: tf.Tensor | None) -> tf.Tensor:
        del is_last  # a branch would cost more than the sum of a scalar
        return self._whole_norm(gradients)

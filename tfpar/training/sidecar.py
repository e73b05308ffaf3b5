"""The sidecar: the short dense vector that travels with the gradients and is summed exactly.

Layout, float32: `[count, non-finite replicas, loss sum, metric sums..., count x floating-point model state...]`.
Summing over replicas and dividing by the summed count weights uneven replicas right, and one flag anywhere tells
every replica of a non-finite gradient before any of them updates anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from tfpar.training.core import LocalSums, Tensors, is_seed_state

import keras
import tensorflow as tf

_FIXED = 3


class Reduced(NamedTuple):
    """Sums over all replicas.

    Attributes:
      count: Float32 scalar: examples (sum of weights) of this update.
      finite: Bool scalar: every replica's loss and gradients are finite.
      loss: Float32 scalar: loss sum.
      metrics: Summed additive metric state.
      state: The model's non-trainable variables, averaged over replicas by example count.
    """

    count: tf.Tensor
    finite: tf.Tensor
    loss: tf.Tensor
    metrics: Tensors
    state: Tensors


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """Packs and unpacks the vector for one model.

    Attributes:
      metric_shapes: Shapes of the additive metric state.
      state_shapes: Shapes of the model's non-trainable variables.
      averaged: For each of them, whether replicas average it (floating-point state such as batch statistics).
        Seed states and counters are the same on every replica anyway.
    """

    metric_shapes: tuple[tuple[int, ...], ...]
    state_shapes: tuple[tuple[int, ...], ...]
    averaged: tuple[bool, ...]

    @classmethod
    def of(cls, state: Sequence[keras.Variable], metric_variables: Sequence[keras.Variable], replicas: int) -> Sidecar:
        """The layout for a model and its metrics; a single replica has nothing to average."""
        return cls(
            metric_shapes=tuple(tuple(variable.shape) for variable in metric_variables),
            state_shapes=tuple(tuple(variable.shape) for variable in state),
            averaged=tuple(
                replicas > 1 and tf.as_dtype(variable.dtype).is_floating and not is_seed_state(variable)
                for variable in state
            ),
        )

    @property
    def length(self) -> int:
        """Number of float32 scalars in the vector."""
        return _FIXED + sum(_size(shape) for shape in self._traveling_shapes())

    def pack(self, sums: LocalSums) -> tuple[tf.Tensor, tf.Tensor]:
        """The vector of one replica, and the square of its gradient's L2 norm.

        A replica counts as non-finite when its loss or that square is not a finite float32.
        """
        norm_squared = tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in sums.gradients])
        finite = tf.math.is_finite(norm_squared) & tf.math.is_finite(sums.loss)
        fixed = [sums.count, tf.cast(~finite, tf.float32), sums.loss]
        state = [
            tf.cast(value, tf.float32) * sums.count
            for value, averaged in zip(sums.state, self.averaged, strict=True)
            if averaged
        ]
        parts = [tf.stack(fixed), *[tf.reshape(part, [-1]) for part in [*sums.metrics, *state]]]
        return tf.concat(parts, axis=0), norm_squared

    def unpack(self, vector: tf.Tensor, local_state: Tensors) -> Reduced:
        """The sums over all replicas.

        Args:
          vector: The summed vector.
          local_state: This replica's non-trainable variables, for those that do not travel.
        """
        shapes = self._traveling_shapes()
        sizes = [_size(shape) for shape in shapes]
        fixed, *parts = tf.split(vector, [_FIXED, *sizes])
        values = [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
        metrics, traveled = values[: len(self.metric_shapes)], iter(values[len(self.metric_shapes) :])
        count = fixed[0]
        state = [
            tf.cast(next(traveled) / tf.maximum(count, 1e-30), local.dtype) if averaged else local
            for local, averaged in zip(local_state, self.averaged, strict=True)
        ]
        return Reduced(count, tf.equal(fixed[1], 0.0), fixed[2], metrics, state)

    def _traveling_shapes(self) -> list[tuple[int, ...]]:
        state = [shape for shape, averaged in zip(self.state_shapes, self.averaged, strict=True) if averaged]
        return [*self.metric_shapes, *state]


def _size(shape: Sequence[int]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size

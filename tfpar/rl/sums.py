"""The named sums of a reinforcement learning objective, and the moments that replicas sum before the gradient.

Shapes: m transitions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.training.objective import Tensors, Totals

import tensorflow as tf

_EPSILON = 1e-8


class NamedSums(NamedTuple):
    """Values `[m]` by name, which are added up."""

    values: Mapping[str, tf.Tensor]

    def in_order(self, names: Sequence[str]) -> Tensors:
        """Returns the sums in the order of `names`, float32 scalars."""
        return [tf.reduce_sum(self.values[name]) for name in names]


class Scales(NamedTuple):
    """Float32 scalars over a minibatch of all replicas, by which an objective normalises.

    Attributes:
      advantage: Mean of the advantages.
      factor: Inverse of their deviation.
      target: Mean of the values' targets.
      missed: Mean of the differences between targets and values.
    """

    advantage: tf.Tensor
    factor: tf.Tensor
    target: tf.Tensor
    missed: tf.Tensor

    @classmethod
    def of(
        cls,
        advantage: tf.Tensor,
        target: tf.Tensor,
        missed: tf.Tensor,
        weight: tf.Tensor,
        total: Callable[[tf.Tensor], tf.Tensor],
    ) -> Scales:
        """Returns the scales of a minibatch.

        Args:
          advantage: Float32, of any shape: those of this replica.
          target: Like `advantage`.
          missed: Like `advantage`.
          weight: Like `advantage`.
          total: Sums a tensor over all replicas.
        """
        mean, variance = moments(tf.stack([advantage, target, missed]), weight, total)
        return cls(mean[0], 1.0 / (tf.sqrt(variance[0]) + _EPSILON), mean[1], mean[2])

    @classmethod
    def unknown(cls) -> Scales:
        """Returns scales that change nothing."""
        return cls(tf.zeros([]), tf.ones([]), tf.zeros([]), tf.zeros([]))


def moments(
    values: tf.Tensor, weight: tf.Tensor, total: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns means and variances over all replicas, float32 `[c]` each.

    The second of two passes sums the squares of differences from the mean of the first (Chan, Golub and LeVeque 1983,
    Algorithms for computing the sample variance, equation 1.7): a mean square less a squared mean has no correct digit
    in float32 where the mean is some thousand times the deviation.

    Args:
      values: Float32 `[c, ...]`: c quantities.
      weight: Float32 `[...]`.
      total: Sums a tensor over all replicas.
    """
    over = range(1, values.shape.rank)
    count, *sums = tf.unstack(total(tf.concat([[tf.reduce_sum(weight)], tf.reduce_sum(weight * values, over)], axis=0)))
    mean = tf.math.divide_no_nan(tf.stack(sums), count)
    away = values - tf.reshape(mean, [-1, *[1] * len(over)])
    second = total(tf.concat([tf.reduce_sum(part, over) for part in (weight * away, weight * away * away)], axis=0))
    offset, square = tf.split(tf.math.divide_no_nan(second, count), 2)  # the offset is the rounding of the mean
    return mean + offset, tf.maximum(square - offset * offset, 0.0)


def totals_of(names: Sequence[str], results: Callable[[Mapping[str, float]], dict[str, float]]) -> Totals:
    """Returns the totals of an objective.

    Args:
      names: The names of the sums.
      results: Computes the reported figures from the sums by name.
    """

    def named(state: Sequence[Any]) -> dict[str, float]:
        return results(dict(zip(names, map(float, state), strict=True)))

    return Totals(variables=[tf.TensorSpec([], tf.float32)] * len(names), results=named)

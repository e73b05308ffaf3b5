"""The named sums of an objective of reinforcement learning, and the moments that replicas sum beforehand.

Shapes: m transitions of a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.training.objective import Tensors, Totals

import tensorflow as tf

MOMENTS = 2  # of the advantages: sum and sum of squares
_EPSILON = 1e-8


class NamedSums(NamedTuple):
    """Values `[m]` by name, to be added up."""

    values: Mapping[str, tf.Tensor]

    def in_order(self, names: Sequence[str]) -> Tensors:
        """The sums in this order, float32 scalars."""
        return [tf.reduce_sum(self.values[name]) for name in names]


class Moments(NamedTuple):
    """Sum and sum of squares of the advantages of a micro-batch."""

    total: tf.Tensor
    square: tf.Tensor

    @classmethod
    def of(cls, advantage: tf.Tensor, weight: tf.Tensor) -> Moments:
        """The moments of advantages `[m]` with these weights `[m]`."""
        return cls(tf.reduce_sum(weight * advantage), tf.reduce_sum(weight * advantage * advantage))

    def terms(self) -> Tensors:
        """As loss terms without a numerator, which are summed over the replicas before the gradient is taken."""
        return [tf.zeros([]), self.total, tf.zeros([]), self.square]

    @staticmethod
    def normalised(advantage: tf.Tensor, scales: tf.Tensor | None) -> tf.Tensor:
        """The advantages less their mean, divided by their deviation.

        Args:
          advantage: `[m]`.
          scales: From `PolicyTotals.scales`; without them only `terms` is needed.
        """
        return advantage if scales is None else (advantage - scales[0]) * scales[1]


def totals_of(names: Sequence[str], results: Callable[[Mapping[str, float]], dict[str, float]]) -> Totals:
    """The totals for sums of these names without moments; arguments as for `PolicyTotals.of`."""

    def named(state: Sequence[Any]) -> dict[str, float]:
        return results(dict(zip(names, map(float, state), strict=True)))

    return Totals(variables=[tf.TensorSpec([], tf.float32)] * len(names), results=named)


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyTotals(Totals):
    """`Totals` whose sums before the gradient are the moments of the advantages."""

    @classmethod
    def of(cls, names: Sequence[str], results: Callable[[Mapping[str, float]], dict[str, float]]) -> PolicyTotals:
        """The totals for moments and sums of these names.

        Args:
          names: The names of the other sums.
          results: Computes the reported figures from these sums by name.
        """

        def named(state: Sequence[Any]) -> dict[str, float]:
            return results(dict(zip(names, map(float, state[2 * MOMENTS :]), strict=True)))

        variables = [tf.TensorSpec([], tf.float32)] * (2 * MOMENTS + len(names))
        return cls(variables=variables, terms=MOMENTS, results=named, needs_scales=True)

    def scales(self, sums: tf.Tensor) -> tf.Tensor:
        """Mean and inverse deviation of the advantages: float32 `[2]`.

        Args:
          sums: Float32 `[3]`: count, sum and sum of squares, over all replicas.
        """
        mean = tf.math.divide_no_nan(sums[1], sums[0])
        variance = tf.maximum(tf.math.divide_no_nan(sums[2], sums[0]) - mean * mean, 0.0)
        return tf.stack([mean, 1.0 / (tf.sqrt(variance) + _EPSILON)])

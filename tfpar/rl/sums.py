"""The named sums of a reinforcement learning objective, and the moments that replicas reduce before the gradient.

Shapes: m transitions of a micro-batch.
"""

from __future__ import annotations

import dataclasses
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


class Moments(NamedTuple):
    """Sum and sum of squares of the advantages of a micro-batch."""

    total: tf.Tensor
    square: tf.Tensor

    @classmethod
    def of(cls, advantage: tf.Tensor, weight: tf.Tensor) -> Moments:
        """Returns the moments of advantages `[m]` with weights `[m]`."""
        return cls(tf.reduce_sum(weight * advantage), tf.reduce_sum(weight * advantage * advantage))

    def terms(self) -> Tensors:
        """Returns loss terms without a numerator, which replicas sum before they compute the gradient."""
        return [tf.zeros([]), self.total, tf.zeros([]), self.square]

    @staticmethod
    def normalised(advantage: tf.Tensor, scales: tf.Tensor | None) -> tf.Tensor:
        """Returns the advantages minus their mean, divided by their deviation.

        Args:
          advantage: `[m]`.
          scales: The result of `PolicyTotals.scales`; None while only `terms` is needed.
        """
        return advantage if scales is None else (advantage - scales[0]) * scales[1]


_MOMENTS = len(Moments._fields)


def totals_of(names: Sequence[str], results: Callable[[Mapping[str, float]], dict[str, float]]) -> Totals:
    """Returns the totals for sums of these names, without moments; the arguments are those of `PolicyTotals.of`."""

    def named(state: Sequence[Any]) -> dict[str, float]:
        return results(dict(zip(names, map(float, state), strict=True)))

    return Totals(variables=[tf.TensorSpec([], tf.float32)] * len(names), results=named)


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyTotals(Totals):
    """`Totals` that reduce the moments of the advantages before the gradient."""

    @classmethod
    def of(cls, names: Sequence[str], results: Callable[[Mapping[str, float]], dict[str, float]]) -> PolicyTotals:
        """Returns the totals for the moments and for sums of these names.

        Args:
          names: The names of the sums.
          results: Computes the reported figures from the sums by name.
        """

        def named(state: Sequence[Any]) -> dict[str, float]:
            return results(dict(zip(names, map(float, state[2 * _MOMENTS :]), strict=True)))

        variables = [tf.TensorSpec([], tf.float32)] * (2 * _MOMENTS + len(names))
        return cls(variables=variables, terms=_MOMENTS, results=named, needs_scales=True)

    def scales(self, sums: tf.Tensor) -> tf.Tensor:
        """Returns the mean and the inverse deviation of the advantages, float32 `[2]`.

        Args:
          sums: Float32 `[3]`: count, sum and sum of squares, over all replicas.
        """
        mean = tf.math.divide_no_nan(sums[1], sums[0])
        variance = tf.maximum(tf.math.divide_no_nan(sums[2], sums[0]) - mean * mean, 0.0)
        return tf.stack([mean, 1.0 / (tf.sqrt(variance) + _EPSILON)])

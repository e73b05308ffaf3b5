"""The sidecar: the short dense vector that travels with the gradients and is summed exactly.

Layout, float32: `[non-finite replicas, count, loss sum, metric sums..., count x change of model state...]`.
Summing over replicas and dividing by the summed count weights uneven replicas correctly, and the flag informs every
replica of a non-finite gradient before any of them changes a variable. For model state (batch statistics) the sidecar
holds the change, not the value: an average of equal values may differ from them in the last bit, but an average of zero
changes is zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfpar.exchange import Exchange
from tfpar.exchange.reducer import ShouldApply
from tfpar.exchange.residual_units import CountedDecision
from tfpar.optim.keras_internals import is_seed_state
from tfpar.precision import difference, moved
from tfpar.training.core import Core
from tfpar.training.model.adapting import frozen_weights
from tfpar.training.objective import LocalSums, Tensors

import keras
import tensorflow as tf

# Places of the scalars at the front; metric sums follow, then model state.
NON_FINITE, COUNT, LOSS, METRICS = range(4)


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """Packs and unpacks the vector for one model.

    Attributes:
      metric_shapes: Shapes of the additive metric state.
      state_shapes: Shapes of the model's non-trainable variables.
      averaged: For each of them, whether replicas average it (floating-point state such as batch statistics).
        Seed states, counters and frozen weights are the same on every replica anyway.
      denominator: Index of the scalar by which loss and gradients are divided: the count, or a sum among the metrics if
        a mask or weights determine the average.
      loss_count: Index of the scalar by which local steps weight workers, see `Totals.loss_count`.
    """

    metric_shapes: tuple[tuple[int, ...], ...]
    state_shapes: tuple[tuple[int, ...], ...]
    averaged: tuple[bool, ...]
    denominator: int = COUNT
    loss_count: int = COUNT

    @classmethod
    def of(
        cls,
        state: Sequence[keras.Variable],
        metric_variables: Sequence[keras.Variable],
        replicas: int,
        frozen: Sequence[keras.Variable] = (),
        *,
        own_denominator: bool = False,
        loss_count: int | None = None,
    ) -> Sidecar:
        """The layout for a model and its metrics; a single replica has nothing to average.

        Args:
          state: The model's non-trainable variables.
          metric_variables: Additive metric state.
          replicas: Replicas of all workers.
          frozen: The variables of `state` that are frozen weights.
          own_denominator: Whether the loss is divided by the second metric variable, a scalar, see `Totals`.
          loss_count: See `Totals`.
        """
        kept = {id(variable) for variable in frozen}
        return cls(
            metric_shapes=tuple(tuple(variable.shape) for variable in metric_variables),
            state_shapes=tuple(tuple(variable.shape) for variable in state),
            averaged=tuple(
                replicas > 1
                and tf.as_dtype(variable.dtype).is_floating
                and not is_seed_state(variable)
                and id(variable) not in kept
                for variable in state
            ),
            denominator=METRICS + 1 if own_denominator else COUNT,
            loss_count=COUNT if loss_count is None else METRICS + loss_count,
        )

    @classmethod
    def of_core(cls, core: Core, replicas: int) -> Sidecar:
        """The layout for a core on this number of replicas."""
        return cls.of(
            core.traveling_variables,
            core.metric_variables,
            replicas,
            frozen=frozen_weights(core.model),
            own_denominator=core.objective.totals.own_denominator,
            loss_count=core.objective.totals.loss_count,
        )

    @property
    def length(self) -> int:
        """Number of float32 scalars in the vector."""
        return self.report_length + sum(math.prod(shape) for shape in self._traveling_shapes())

    @property
    def report_length(self) -> int:
        """Scalars before the model state: what a step reports."""
        return METRICS + sum(math.prod(shape) for shape in self.metric_shapes)

    def pack(self, sums: LocalSums, before: Tensors) -> tf.Tensor:
        """The vector of one replica without its first scalar, the non-finite flag: see `flag`.

        Args:
          sums: The replica's contribution.
          before: The model's non-trainable variables before the step, the same on all replicas.
        """
        state = [
            difference(after, old) * sums.count
            for after, old, averaged in zip(sums.state, before, self.averaged, strict=True)
            if averaged
        ]
        parts = [tf.stack([sums.count, sums.loss]), *[tf.reshape(part, [-1]) for part in [*sums.metrics, *state]]]
        return tf.concat(parts, axis=0)

    @staticmethod
    def flag(packed: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
        """The whole vector of one replica.

        Args:
          packed: The result of `pack`.
          norm: L2 norm of this replica's gradient sums. The replica counts as non-finite if its loss is not finite, or
            if the sum over all replicas of gradients of this size would not be a finite float32.
        """
        finite = tf.math.is_finite(norm) & tf.math.is_finite(packed[LOSS - 1])
        return tf.concat([[tf.where(finite, 0.0, 1.0)], packed], axis=0)

    def base(self, before: Tensors, after: Tensors) -> Tensors:
        """The values that `state` starts from: the values before the update for variables whose change is sent, and
        this replica's new values for all others."""
        return [old if averaged else new for old, new, averaged in zip(before, after, self.averaged, strict=True)]

    def state(self, vector: tf.Tensor, base: Tensors) -> Tensors:
        """The model's non-trainable variables after the update: averages over replicas, weighted by examples.

        Args:
          vector: The summed vector.
          base: From `base`.
        """
        shapes = self._traveling_shapes()
        parts = tf.split(vector[self.report_length :], [math.prod(shape) for shape in shapes]) if shapes else []
        traveled = iter([tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)])
        count = tf.maximum(vector[COUNT], 1e-30)
        return [
            moved(value, next(traveled) / count) if averaged else value
            for value, averaged in zip(base, self.averaged, strict=True)
        ]

    def should_apply(self, vector: tf.Tensor) -> tf.Tensor:
        """Whether the summed vector, or its front, calls for an update: all replicas are finite, and there is something
        to learn from.

        Without a divisor, the gradient cannot be averaged: a codec's residuals, which an exchange adds to it, would be
        lost. The divisor may be zero beside examples, if a mask leaves out all their positions.
        """
        return is_applicable(vector) & tf.not_equal(vector[self.denominator], 0.0)

    @property
    def decision(self) -> ShouldApply:
        """`should_apply` for an exchange, which is also told the number of examples."""
        return CountedDecision(self.should_apply, lambda vector: vector[COUNT])

    def metrics(self, reports: tf.Tensor) -> Tensors:
        """Metric state summed over the steps that were applied.

        Args:
          reports: `[n, report_length]`, the front of the summed vector of each step.
        """
        applied = tf.equal(reports[:, NON_FINITE], 0.0)[:, None]  # a step left out may hold NaN
        total = tf.reduce_sum(tf.where(applied, reports[:, METRICS:], 0.0), axis=0)
        sizes = [math.prod(shape) for shape in self.metric_shapes]
        parts = tf.split(total, sizes) if sizes else []
        return [tf.reshape(part, shape) for part, shape in zip(parts, self.metric_shapes, strict=True)]

    def _traveling_shapes(self) -> list[tuple[int, ...]]:
        return [shape for shape, averaged in zip(self.state_shapes, self.averaged, strict=True) if averaged]


def is_applicable(vector: tf.Tensor) -> tf.Tensor:
    """Whether all replicas are finite, and there are examples, from the summed sidecar."""
    return tf.equal(vector[NON_FINITE], 0.0) & (vector[COUNT] > 0.0)


class Reduced(NamedTuple):
    """The results of parts 3 to 5 of a step.

    Attributes:
      vector: The summed sidecar.
      norm: L2 norm of the mean gradient before clipping; zero if it was not requested.
      exchanged: Host time at which the exchange was over.
      done: A tensor that exists when the weights have their new values.
    """

    vector: tf.Tensor
    norm: tf.Tensor
    exchanged: tf.Tensor
    done: tf.Tensor


def follow_examples(should_apply: ShouldApply, exchange: Exchange, examples: Callable[[], tf.Tensor]) -> None:
    """Puts residuals that leave before the summed sidecar is known into the units of a step. In a replica context.

    Args:
      should_apply: As the exchange is told it: nothing is done if it does not count examples.
      exchange: The exchange.
      examples: Returns the number of examples of the step over all replicas, the same on all: a float32 scalar.
    """
    units = exchange.early_units
    if not units or not isinstance(should_apply, CountedDecision):
        return

    def merged(strategy: tf.distribute.Strategy, value: Any) -> None:
        for each in units:
            each.follow(strategy.experimental_local_results(value)[0])

    tf.distribute.get_replica_context().merge_call(merged, args=(examples(),))

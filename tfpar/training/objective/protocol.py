"""The protocol of objectives: pure functions from weights and one micro-batch to sums over its examples.

An objective returns sums, not means, so that micro-batches, replicas and workers of any size add up; the step divides
once all sums are added. Shapes: m examples a micro-batch, K loss terms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

Tensors = list[tf.Tensor]
Batch = tuple[Any, Any, tf.Tensor]


def _no_results(_: Sequence[Any]) -> dict[str, Any]:
    return {}


def _mean_loss(loss: Any, count: Any, _: Sequence[Any]) -> dict[str, Any]:
    return {"loss": float(loss / count)}


class ObjectiveSums(NamedTuple):
    """The result of an objective for one micro-batch.

    Attributes:
      loss: Float32 scalar: sum over examples of weight x loss; `Totals` determines its divisor.
      count: Float32 scalar: sum of the example weights.
      state: The model's non-trainable variables after the micro-batch.
      metrics: Float32: the amounts that the examples add to the variables of `Totals`, one flat list.
    """

    loss: tf.Tensor
    count: tf.Tensor
    state: Tensors
    metrics: Tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Totals:
    """The sums beside loss and count, and how to compute values from the sums.

    Attributes:
      variables: Variables of these shapes, to which examples add. Loss terms that have a sum of their own come first,
        each with two scalars, numerator and denominator.
      terms: Number of such loss terms, K.
      results: Metrics by name from sums over training steps, arrays in the order of `variables`.
      evaluation: `loss` and metrics by name from the sums of an evaluation: of the loss, of the count, which is not 0,
        and of the other variables.
      own_denominator: Whether the loss is divided by the denominator of its only term instead of by the count.
      needs_scales: Whether several denominators must be summed over all replicas before the gradient is taken, because
        a sum of gradients cannot be divided by several numbers afterwards. The objective then takes `scales`.
      loss_count: Index, among the sums of `variables`, of the scalar by which local steps weight workers: the
        denominator of the main loss term. None for the number of examples.
      metrics: The metrics by the names that they are reported under.
      takes_count: Bool for each term: whether its scale is the count itself, because its loss has no divisor.
      batch_losses: `loss` and the losses of single outputs by name from the sums of one batch, if some loss is not a
        mean over examples; otherwise None.
    """

    variables: Sequence[keras.Variable] = ()
    terms: int = 0
    results: Callable[[Sequence[Any]], dict[str, Any]] = _no_results
    evaluation: Callable[[Any, Any, Sequence[Any]], dict[str, Any]] = _mean_loss
    own_denominator: bool = False
    needs_scales: bool = False
    loss_count: int | None = None
    takes_count: tuple[bool, ...] = ()
    metrics: Mapping[str, keras.metrics.Metric] = dataclasses.field(default_factory=dict)
    batch_losses: Callable[[Any, Any, Sequence[Any]], dict[str, Any]] | None = None

    @property
    def columns(self) -> int:
        """The number of sums of each batch that `weighted_losses` takes."""
        return 2 + 2 * self.terms if self.batch_losses else 0

    def weighted_losses(self, rows: np.ndarray) -> dict[str, float]:
        """The sums of `batch_losses` times examples over batches. Divided by all examples, they are the means that
        Keras' `evaluate` computes.

        Args:
          rows: Float64 `[batches, columns]`: the sums of the loss, of the count, and of the loss terms.
        """
        if self.batch_losses is None:
            return {}
        found: dict[str, float] = {}
        for loss, count, *state in rows[rows[:, 1] > 0]:
            for name, value in self.batch_losses(loss, count, state).items():
                found[name] = found.get(name, 0.0) + float(count * value)
        return found

    def scales(self, sums: tf.Tensor) -> tf.Tensor:
        """The factor of each loss term, `[K]`, so that its sum can be divided by the count.

        Args:
          sums: Float32 `[1 + K]`: count and denominators, summed over everything that the step averages.
        """
        denominators = tf.where(self.takes_count, 1.0, sums[1:])
        return tf.math.divide_no_nan(sums[0], denominators)


class Objective(Protocol):
    """A pure function of weights, model state and a micro-batch. It must not read variables or call collectives."""

    @property
    def totals(self) -> Totals:
        """The sums of the objective beside the loss."""

    def __call__(
        self, params: Tensors, state: Tensors, batch: Batch, *, training: bool, scales: tf.Tensor | None = None
    ) -> ObjectiveSums:
        """Sums over one micro-batch; `ObjectiveSums.loss` is differentiated with respect to `params`.

        Args:
          params: Values of the model's trainable variables.
          state: Values of the model's non-trainable variables, seed states included.
          batch: `(x, y, weight)`: x and y structures of `[m, ...]`, weight float32 `[m]`; a padded example has 0.
          training: Whether the model runs in training mode.
          scales: From `Totals.scales`, where `Totals.needs_scales`; without it, terms only enter `metrics`.
        """

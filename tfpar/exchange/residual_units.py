"""Residuals in units of the mean, although gradient sums are exchanged.

A step divides its gradient sums by its number of examples. What an exchange of sums leaves for later steps therefore
weighs more in a step of fewer examples, such as the last one of an epoch: with one example instead of 64, 64 times as
much. So residuals are scaled by the ratio of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tfpar.collectives.tensorflow import PER_WORKER, local_copy
from tfpar.exchange.buckets import IN_UNITS_OF_SUMS

import numpy as np
import tensorflow as tf

# Name of the number of examples in the export of an exchange; older checkpoints have none.
EXAMPLES = "examples"


class CountedDecision:
    """A `ShouldApply` of steps that divide gradient sums by a number of examples.

    Args:
      should_apply: Maps the summed sidecar to whether the step is applied.
      examples: Maps the summed sidecar to the number of examples of the step, a float32 scalar.
    """

    def __init__(
        self, should_apply: Callable[[tf.Tensor], tf.Tensor], examples: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        self._should_apply = should_apply
        self.examples = examples

    def __call__(self, sidecar: tf.Tensor) -> tf.Tensor:
        """Whether the step is applied: bool scalar."""
        return self._should_apply(sidecar)


class ResidualUnits:
    """The number of examples of the step in whose sums the residuals of an exchange count.

    Args:
      device: Where the exchange runs.
      state: Returns the variables by name of each bucket, which may change between two functions that are traced.
    """

    def __init__(self, device: str, state: Callable[[], Iterable[Mapping[str, tf.Variable]]]) -> None:
        self._device, self._state = device, state
        with tf.device(device):
            # 0: not known, as before the first step and after one that does not count examples.
            self._examples = tf.Variable(0.0, trainable=False, name="exchange_examples", **PER_WORKER)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that hold gradient sums."""
        return [variable for part in self._state() for name, variable in part.items() if name in IN_UNITS_OF_SUMS]

    def follow_sidecar(self, should_apply: Callable[[tf.Tensor], tf.Tensor], sidecar: tf.Tensor) -> None:
        """`follow` if the decision knows the number of examples from the summed sidecar."""
        if isinstance(should_apply, CountedDecision):
            self.follow(should_apply.examples(sidecar))

    def follow(self, examples: tf.Tensor) -> None:
        """Scales residuals for a step, before they are read; right too if the step is not applied.

        Args:
          examples: Number of examples of the step over all replicas, a float32 scalar.
        """
        variables = self.variables
        if not variables:
            return
        known = local_copy(self._examples)
        with tf.device(self._device):
            before = known.read_value()

            def scaled() -> tf.Tensor:
                ratio = tf.where(before > 0.0, examples / before, 1.0)
                for variable in variables:
                    variable.assign(variable.read_value() * ratio, read_value=False)
                known.assign(examples, read_value=False)
                return tf.constant(True)

            changes = tf.not_equal(examples, before) & (examples > 0.0) & tf.math.is_finite(examples)
            tf.cond(changes, scaled, lambda: tf.constant(False))

    def export(self) -> dict[str, np.ndarray]:
        """The number, for a checkpoint."""
        return {EXAMPLES: np.array(local_copy(self._examples).numpy(), np.float32)}

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Restores the number from the export of a worker."""
        local_copy(self._examples).assign(saved.get(EXAMPLES, np.float32(0.0)))

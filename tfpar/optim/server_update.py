"""Keras' optimizers, applied where the variables are: on parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.optim import keras_internals
from tfpar.optim.keras_internals import OptimizerView
from tfpar.optim.pure_update import apply_reached

import keras
import tensorflow as tf


def apply_on_servers(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    gradients: Sequence[tf.Tensor | None],
    variables: Sequence[keras.Variable],
    learning_rate: tf.Tensor,
) -> None:
    """One update of the variables on their servers. Call in a function that a coordinator schedules.

    Args:
      optimizer: A built optimizer.
      strategy: A ParameterServerStrategy, in whose scope the variables and the optimizer were made.
      gradients: Gradients of `variables`; None leaves a variable as it is.
      variables: Variables that the optimizer was built with.
      learning_rate: Float32 scalar that takes the place of the optimizer's learning rate.
    """
    view = keras_internals.view_of(optimizer, ServerUpdate, learning_rate, _servers=strategy)
    apply_reached(view, gradients, variables)


class ServerUpdate(OptimizerView):
    """Applies updates where the variables are, from inside a `tf.cond`.

    Keras 3.15 wraps its updates in `maybe_merge_call`, which under ParameterServerStrategy (TensorFlow 2.21) asks for a
    replica context that a function scheduled by the coordinator does not have. Here the update goes straight to
    `strategy.extended.update`, which places it on the variable's server.
    """

    def view_update(self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable], rate: Any) -> None:
        """The optimizer's rule, on each variable's server."""
        keras_internals.update_where_placed(self, self._servers, gradients, variables, rate)

    def view_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Decoupled decay, `w -= rate x decay x w`, on each variable's server."""

        def decay(variable: tf.Variable, factor: tf.Tensor) -> None:
            variable.assign_sub(variable * factor)

        for variable in keras_internals.decayed(self, variables):
            factor = tf.cast(self.learning_rate * self.weight_decay, variable.dtype)
            self._servers.extended.update(variable.value, decay, args=(factor,), group=False)

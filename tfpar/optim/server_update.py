"""Keras' optimizers, applied where the variables are: on parameter servers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class _ServerUpdate(keras.optimizers.Optimizer):
    """Applies updates where the variables are, from inside a `tf.cond`.

    Keras 3.15 wraps its updates in `maybe_merge_call`, which under ParameterServerStrategy (TensorFlow 2.21) asks for a
    replica context that a function scheduled by the coordinator does not have. Here the update goes straight to
    `strategy.extended.update`, which places it on the variable's server. `on_servers` puts this class between the
    optimizer's own class and Keras' TensorFlow backend.
    """

    def _get_current_learning_rate(self) -> Any:
        return self._rate

    def _backend_update_step(
        self, grads: Sequence[tf.Tensor], trainable_variables: Sequence[keras.Variable], learning_rate: Any
    ) -> None:
        pairs = [(gradient, variable.value) for gradient, variable in zip(grads, trainable_variables, strict=True)]
        self._distributed_tf_update_step(self._strategy, pairs, learning_rate)

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        if self.weight_decay is None:
            return

        def decay(variable: tf.Variable, factor: tf.Tensor) -> None:
            variable.assign_sub(variable * factor)

        for variable in variables:
            if self._use_weight_decay(variable):
                factor = tf.cast(self.learning_rate * self.weight_decay, variable.dtype)
                self._strategy.extended.update(variable.value, decay, args=(factor,), group=False)


@functools.cache
def _server_class(kind: Any) -> type[keras.optimizers.Optimizer]:
    return type(f"Server{kind.__name__}", (kind, _ServerUpdate), {})


def on_servers(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> keras.optimizers.Optimizer:
    """The same optimizer (it shares every attribute) with `_ServerUpdate`'s way to update."""
    kind: Any = type(optimizer)
    view = object.__new__(_server_class(kind))
    vars(view).update(vars(optimizer))
    vars(view)["_strategy"] = strategy
    vars(view)["_rate"] = None
    return view

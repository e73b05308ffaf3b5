"""Keras' optimizers that exchange gradients with other workers before they update: the heart of the drop-in.

Keras 3.15 adds up the rows of an embedding's gradient that belong to the same token where it adds them to a tensor,
which is after clipping and after squaring them (Adam, RMSprop, Adagrad): its steps depend on how often a token occurs
in the batch of one process. Here rows are summed first, on any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.optim.keras_internals import OptimizerView

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util


class GradientMean(Protocol):
    """The operations of the exchange that an optimizer needs."""

    def completed(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: keras.optimizers.Optimizer
    ) -> list[Any]:
        """The gradients, with zeros for variables that have one on other workers only."""

    def mean(
        self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: keras.optimizers.Optimizer
    ) -> list[Any]:
        """The mean of the workers' gradients of these variables, the same bits on each worker."""


def exchange_before_update(optimizer: keras.optimizers.Optimizer, exchange: GradientMean) -> None:
    """Makes an optimizer apply the mean of all workers' gradients. It keeps its class for Keras and in saved models.

    Args:
      optimizer: Is changed.
      exchange: What gives the means; `exchange_of(optimizer)` returns it.
    """
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    way = ExchangedLossScaleUpdate if scales else ExchangedUpdate
    keras_internals.become(optimizer, way, _tfpar_exchange=exchange)


def sum_rows_before_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer of a single worker sum repeated rows of gradients first, as an exchange does.

    Args:
      optimizer: Is changed; keeps its class for Keras and in saved models. Called again, this does nothing.
    """
    if not issubclass(type(optimizer), SummedRowsUpdate):
        keras_internals.become(optimizer, SummedRowsUpdate)


def exchange_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """What `exchange_before_update` gave to an optimizer; None for any other."""
    return getattr(optimizer, "_tfpar_exchange", None)


class SummedRowsUpdate(OptimizerView):
    """The changes to an optimizer that gets gradients of embeddings without repeated rows."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Sums rows of the same index, then applies the gradients."""
        super().apply([_with_summed_rows(gradient) for gradient in grads], trainable_variables)


class ExchangedUpdate(OptimizerView):
    """The changes of a distributed optimizer to its own class, which comes next in the order of bases."""

    _tfpar_exchange: GradientMean

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Exchanges gradients, then applies their means."""
        variables = self._ready(grads, trainable_variables)
        grads = self._tfpar_exchange.completed(grads, variables, self)
        if not self.gradient_accumulation_steps:
            grads = self._tfpar_exchange.mean(grads, variables, self)
        super().apply(grads, variables)

    def _ready(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> list[Any]:
        """The variables to update; builds the optimizer if it is not."""
        if trainable_variables is None:
            if not self.built:
                super().apply(grads)  # raises Keras' error, which says to build it
            return keras_internals.trainable_variables(self)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        return list(trainable_variables)

    # Keras 3.15 accumulates in what `view_apply` stands for, and clips the accumulated mean where it updates: the one
    # place between the two.

    def view_apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Notes the variables for `view_clip`."""
        keras_internals.set_untracked(self, _tfpar_updating=list(variables))
        super().view_apply(gradients, variables)

    def view_clip(self, gradients: Sequence[Any]) -> Any:
        """Exchanges the accumulated gradients, then clips the mean."""
        if self.gradient_accumulation_steps:
            gradients = self._tfpar_exchange.mean(gradients, self._tfpar_updating, self)
        return super().view_clip(gradients)

    def __setattr__(self, name: str, value: Any) -> None:
        # The constructor of a LossScaleOptimizer does this to the optimizer that it is given.
        if name == "loss_scale_factor" and value is None:
            raise ConfigError(
                "mixed_float16 puts a LossScaleOptimizer around tfpar.DistributedOptimizer, and workers would skip "
                "different steps. Write tfpar.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)): "
                "mixed_float16 then uses that one."
            )
        super().__setattr__(name, value)


class ExchangedLossScaleUpdate(ExchangedUpdate):
    """The same for a LossScaleOptimizer, which decides from the means whether to skip, so that all workers decide the
    same."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Exchanges unscaled gradients, so that residuals do not depend on the loss scale."""
        variables = self._ready(grads, trainable_variables)
        scale = tf.convert_to_tensor(self.dynamic_scale)
        grads = self._tfpar_exchange.completed(grads, variables, self)
        grads = [None if gradient is None else _unscaled(gradient, scale) for gradient in grads]
        means = self._tfpar_exchange.mean(grads, variables, self)
        # Powers of two: scaling there and back does not round.
        super(ExchangedUpdate, self).apply([None if mean is None else mean * scale for mean in means], variables)


def _unscaled(gradient: Any, scale: tf.Tensor) -> Any:
    """A gradient, a tensor or rows, divided by the loss scale.

    In float32, as the scale, also where weights are float16: small gradients do not vanish before they are exchanged.
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, scale.dtype) / scale
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cast(tf.convert_to_tensor(gradient), scale.dtype) / scale


def _with_summed_rows(gradient: Any) -> Any:
    """A gradient without repeated rows: IndexedSlices, or under XLA, which has no `unique`, a dense tensor."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return tf.convert_to_tensor(gradient)
    indices, places = tf.unique(gradient.indices)
    dtype = gradient.values.dtype
    summed = tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype  # sums of halves would round in every step
    values = tf.math.unsorted_segment_sum(tf.cast(gradient.values, summed), places, tf.shape(indices)[0])
    return tf.IndexedSlices(tf.cast(values, dtype), indices, gradient.dense_shape)

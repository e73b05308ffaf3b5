"""Penalties of weights (`regularizer`), of which a device may have a part, or a worker none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tfpar.parallel.held import held_by
from tfpar.parallel.model_axis import current_place
from tfpar.parallel.split import model_split_of
from tfpar.parallel.tensor.obstacles import reading_parts
from tfpar.parallel.tensor.positions import has_gradient_in_parts

import keras
import tensorflow as tf

# Regularizers that are sums over elements. The sum over the parts is that over the whole; padding is zero.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def losses_of(model: keras.Model, scope: keras.StatelessScope) -> list[tf.Tensor]:
    """Returns `model.losses` within the scope of a call, on each device those of the whole model.

    A weight that several workers of a pipeline hold is penalised on one of them, since its gradients are summed over
    these workers, and losses over all of them.

    Args:
      model: The model.
      scope: The open scope, with the values of its variables.
    """
    apart = [each for each in model.trainable_variables if each.regularizer is not None and _is_apart(each)]
    if not apart:
        return list(model.losses)
    with _without_regularizers(apart):
        losses = list(model.losses)
    with reading_parts(apart):
        return [*losses, *(_penalty(variable, scope.get_current_value(variable)) for variable in apart)]


def _is_apart(variable: keras.Variable) -> bool:
    """Whether the penalty is not just that of the value that a device has."""
    divided = model_split_of(variable) is not None or has_gradient_in_parts(variable)
    return held_by(variable) is not None or (divided and current_place() is not None)


@contextlib.contextmanager
def _without_regularizers(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """In this context variables have no regularizers. No other thread reads them meanwhile, see `with_own_heads`."""
    before = [variable.regularizer for variable in variables]
    for variable in variables:
        variable.regularizer = None
    try:
        yield
    finally:
        for variable, regularizer in zip(variables, before, strict=True):
            variable.regularizer = regularizer


def _penalty(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Returns the penalty of a whole weight, from the value that this device has; zero if another worker counts it."""
    held, place, split = held_by(variable), current_place(), model_split_of(variable)
    if held and not held.counts_here:
        return tf.zeros([])
    if place is None:
        return variable.regularizer(value)
    with tf.device(place.device):
        if split is None:
            return variable.regularizer(_summed_over(place.size, value) if has_gradient_in_parts(variable) else value)
        if type(variable.regularizer) in _SUMS:
            return place.leave(variable.regularizer(value))
        return variable.regularizer(place.join(value, split))


def _summed_over(devices: int, value: tf.Tensor) -> tf.Tensor:
    """Returns the value; its gradient, which so many devices add up, is divided among them."""

    @tf.custom_gradient
    def operator(value: tf.Tensor) -> tuple[tf.Tensor, object]:
        return tf.identity(value), lambda upstream: upstream / devices

    return operator(value)

"""Penalties of weights (`regularizer`), of which a device may have a part, or a worker none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tfpar.parallel.held import held_by
from tfpar.parallel.model_axis import current_place
from tfpar.parallel.split import model_split_of
from tfpar.parallel.tensor.obstacles import reading_parts
from tfpar.parallel.tensor.positions import has_gradient_in_parts

import keras
import tensorflow as tf

# Regularizers that are sums over elements. The sum over the parts is that over the whole; padding is zero.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


@contextlib.contextmanager
def whole_penalties(model: keras.Model) -> Iterator[None]:
    """In this context `model.losses`, read in the scope of a call, has the penalties of whole weights on each device.

    A weight that several workers of a pipeline hold is penalised on one of them, since its gradients are summed over
    these workers, and losses over all of them.
    """
    apart = [each for each in model.trainable_variables if each.regularizer is not None and _is_apart(each)]
    for variable in apart:
        if not isinstance(variable.regularizer, _OfWhole):
            variable.regularizer = _OfWhole(variable, variable.regularizer)
        variable.regularizer.users += 1
    try:
        with reading_parts(apart):  # for the stand-in, which Keras gives the value
            yield
    finally:
        for variable in apart:
            penalty = variable.regularizer
            penalty.users -= 1
            if not penalty.users:
                variable.regularizer = penalty.regularizer


@contextlib.contextmanager
def without_penalties(model: keras.Model) -> Iterator[None]:
    """In this context `model.losses` has no penalties of weights."""
    regularizers = [(each, each.regularizer) for each in model.trainable_variables]
    for variable, _ in regularizers:
        variable.regularizer = None
    try:
        yield
    finally:
        for variable, regularizer in regularizers:
            variable.regularizer = regularizer


class _OfWhole:
    """Stands in for the regularizer of a weight. It is right for the device of whatever thread calls it: other devices
    may be traced in the same context.

    Attributes:
      regularizer: The regularizer.
      users: Number of open contexts.
    """

    def __init__(self, variable: keras.Variable, regularizer: Callable[[tf.Tensor], tf.Tensor]) -> None:
        self._variable, self.regularizer, self.users = variable, regularizer, 0

    def __call__(self, value: tf.Tensor) -> tf.Tensor:
        return _penalty(self._variable, self.regularizer, value)


def _is_apart(variable: keras.Variable) -> bool:
    """Whether the penalty is not just that of the value that a device has."""
    divided = model_split_of(variable) is not None or has_gradient_in_parts(variable)
    return held_by(variable) is not None or (divided and current_place() is not None)


def _penalty(variable: keras.Variable, regularizer: Callable[[tf.Tensor], tf.Tensor], value: tf.Tensor) -> tf.Tensor:
    """Returns the penalty of a whole weight, from the value that this device has; zero if another worker counts it."""
    held, place, split = held_by(variable), current_place(), model_split_of(variable)
    if held and not held.counts_here:
        return tf.zeros([])
    if place is None:
        return regularizer(value)
    with tf.device(place.device):
        if split is None:
            return regularizer(_summed_over(place.size, value) if has_gradient_in_parts(variable) else value)
        if type(regularizer) in _SUMS:
            return place.leave(regularizer(value))
        return regularizer(place.join(value, split))


def _summed_over(devices: int, value: tf.Tensor) -> tf.Tensor:
    """Returns the value; its gradient, which so many devices add up, is divided among them."""

    @tf.custom_gradient
    def operator(value: tf.Tensor) -> tuple[tf.Tensor, object]:
        return tf.identity(value), lambda upstream: upstream / devices

    return operator(value)

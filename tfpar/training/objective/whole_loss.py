"""Losses of whole batches, as Keras takes them.

Those of one value for a batch are functions that take the mean over the batch themselves, losses over sets
(`keras.losses.Dice`), and losses of outputs `[m]`, whose last dim is that of examples. The value stands for every
example of the batch. Others have a value per example that depends on the other examples (`keras.losses.Circle`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpar.config import ConfigError

import keras
import numpy as np
import tensorflow as tf

_RELATIVE, _ABSOLUTE = 3e-5, 1e-7
_OF_ONE_EXAMPLE = frozenset(
    each for name, each in vars(keras.losses).items() if name.islower() and name != "circle" and callable(each)
)


def numerator_of(value: tf.Tensor, sample_weight: Any, weight: tf.Tensor, *, is_sum: bool) -> tf.Tensor:
    """The amount that such a loss adds to a numerator over examples.

    Args:
      value: The loss of the batch, a float32 scalar.
      sample_weight: Must be None.
      weight: Float32 `[m]`: 1 for each example; a replica without examples has a single one, with weight 0.
      is_sum: Whether the loss has the reduction `sum`, which has no divisor.

    Raises:
      ConfigError: Sample weights. Keras (3.15) multiplies the value by their mean, so that no example weighs more.
    """
    if sample_weight is not None:
        raise ConfigError(
            "the loss returned one value for the whole batch, so sample weights cannot weigh its examples: it must "
            "keep one value per example (in a function, leave out the mean over the batch; Keras losses inside it: "
            "reduction=None; a model with outputs [m]: give it outputs [m, 1])."
        )
    count = tf.reduce_sum(weight)
    return value * (tf.cast(count > 0, tf.float32) if is_sum else count)


def _growing(leaf: tf.Tensor) -> tf.Tensor:
    """Multiplies floats `[m, ...]` by factors that grow from 1/m to 1 with the example; changes no other leaf."""
    if not leaf.dtype.is_floating:
        return leaf
    factors = tf.range(1, leaf.shape[0] + 1, dtype=tf.float32) / float(leaf.shape[0])
    return leaf * tf.cast(tf.reshape(factors, [-1, *[1] * (leaf.shape.rank - 1)]), leaf.dtype)


def is_mean(value_of: Callable[[Any, Any], Any], y: Any, outputs: Any) -> bool:
    """Whether a loss of one value for a batch is a mean over its examples, tried on made-up examples.

    If it is, the losses of the parts of a batch, weighted by their examples, add up to the loss of the whole batch.

    Args:
      value_of: Computes the loss of labels and outputs, a scalar.
      y: Labels `[m, ...]`, a structure of tensors; m at least 2.
      outputs: Outputs `[m, ...]`, a structure of tensors.
    """
    examples = keras.tree.flatten(outputs)[0].shape[0]
    cut = examples // 2
    values = _of_rows(value_of, y, outputs)
    whole, first, second = (float(values(rows)) for rows in (slice(None), slice(cut), slice(cut, None)))
    mean = (first * cut + second * (examples - cut)) / examples
    return bool(np.isclose(whole, mean, rtol=_RELATIVE, atol=_ABSOLUTE))


def reads_other_examples(loss: keras.losses.Loss, values_of: Callable[[Any, Any], Any], y: Any, outputs: Any) -> bool:
    """Whether the values of a loss with one per example depend on the other examples, tried on made-up examples.

    Args:
      loss: The loss. Most of Keras' are known to read one example at a time, and are not tried.
      values_of: Computes the loss of labels and outputs, `[m, ...]`.
      y: Labels `[m, ...]`, a structure of tensors; m at least 2.
      outputs: Outputs `[m, ...]`, a structure of tensors.

    Returns:
      Whether some examples have other values by themselves. False if the loss fails on made-up examples, or is random.
    """
    if getattr(loss, "fn", None) in _OF_ONE_EXAMPLE and type(loss).__module__.startswith("keras."):
        return False
    values, first = _of_rows(values_of, y, outputs), slice(keras.tree.flatten(outputs)[0].shape[0] // 2)
    try:
        alone, among = np.asarray(values(first)), np.asarray(values(slice(None)))
        if alone.shape[:1] != among[first].shape[:1]:
            return False
        if alone.shape == among[first].shape and _are_close(alone, among[first]):
            return False
        return _are_close(among, np.asarray(values(slice(None))))
    except Exception:  # whatever it is: the values are made up
        return False


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    largest = np.max(np.abs(other), initial=0.0, where=np.isfinite(other))
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-5 * largest, equal_nan=True))


def _of_rows(value_of: Callable[[Any, Any], Any], y: Any, outputs: Any) -> Callable[[slice], Any]:
    """The loss of some of the examples.

    Parts of one distribution have nearly the same loss, so outputs and labels grow with the example. They grow at
    different rates, because equal outputs and labels would have no loss.
    """
    outputs = keras.tree.map_structure(_growing, outputs)
    y = keras.tree.map_structure(lambda leaf: tf.sqrt(_growing(leaf)) if leaf.dtype.is_floating else leaf[::-1], y)
    return lambda rows: value_of(*(keras.tree.map_structure(lambda leaf: leaf[rows], part) for part in (y, outputs)))

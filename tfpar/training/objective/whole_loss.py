"""Losses of one value for a whole batch, as Keras takes them.

These are functions that take the mean over the batch themselves, losses over sets (`keras.losses.Dice`), and losses of
outputs `[m]`, whose last dim is that of examples. The value stands for every example of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpar.config import ConfigError

import keras
import numpy as np
import tensorflow as tf

_RELATIVE, _ABSOLUTE = 3e-5, 1e-7


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
    # Parts of one distribution have nearly the same loss, so outputs and labels grow with the example. They grow at
    # different rates, because equal outputs and labels would have no loss.
    outputs = keras.tree.map_structure(_growing, outputs)
    y = keras.tree.map_structure(lambda leaf: tf.sqrt(_growing(leaf)) if leaf.dtype.is_floating else leaf[::-1], y)
    whole, first, second = (
        float(value_of(*(keras.tree.map_structure(lambda leaf, rows=rows: leaf[rows], part) for part in (y, outputs))))
        for rows in (slice(None), slice(cut), slice(cut, None))
    )
    mean = (first * cut + second * (examples - cut)) / examples
    return bool(np.isclose(whole, mean, rtol=_RELATIVE, atol=_ABSOLUTE))

"""The two forms of a gradient, tensor and rows of an embedding, and conversions for the exchange."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from tfpar.exchange.algorithms.sparse_rows import RowGradient, summed_by_row

import tensorflow as tf

# A float32 tensor, or the rows of an embedding.
Gradient: TypeAlias = tf.Tensor | RowGradient


def as_float32(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices], shapes: Sequence[tf.TensorShape], sparse: Collection[int]
) -> list[Gradient]:
    """Gradients in the form that a reducer takes.

    Args:
      gradients: Tensors of any float type, or `tf.IndexedSlices`.
      shapes: Static shapes of the variables.
      sparse: Indices of the variables of which rows travel.

    Returns:
      Float32 tensors; of `sparse`, rows none of which comes twice.

    Raises:
      ValueError: One is None.
    """
    missing = [index for index, gradient in enumerate(gradients) if gradient is None]
    if missing:
        raise ValueError(
            f"the gradients {missing} of {len(gradients)} are None: the loss does not depend on these variables. Leave "
            "them out, also of build(), or ask for zeros: tape.gradient(..., "
            "unconnected_gradients=tf.UnconnectedGradients.ZERO)"
        )
    result: list[Gradient] = []
    for index, (gradient, shape) in enumerate(zip(gradients, shapes, strict=True)):
        if index not in sparse:
            # Rows that become a tensor lose their shape.
            result.append(tf.ensure_shape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), shape))
        elif isinstance(gradient, tf.IndexedSlices):
            result.append(summed_by_row(gradient.values, gradient.indices))
        else:
            result.append((tf.cast(gradient, tf.float32), tf.range(shape[0], dtype=tf.int64)))
    return result


def as_slices(
    gradients: Sequence[Gradient], shapes: Sequence[tf.TensorShape], function: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor | tf.IndexedSlices]:
    """A function of each gradient, rows as `tf.IndexedSlices`.

    Args:
      gradients: Gradients in the form that a reducer returns.
      shapes: Static shapes of the variables.
      function: Maps zeros to zeros, and each element by itself.
    """
    result: list[tf.Tensor | tf.IndexedSlices] = []
    for gradient, shape in zip(gradients, shapes, strict=True):
        if isinstance(gradient, tuple):
            values, indices = gradient
            dense_shape = tf.constant(shape.as_list(), tf.int64)
            result.append(tf.IndexedSlices(function(values), indices, dense_shape))
        else:
            result.append(function(gradient))
    return result

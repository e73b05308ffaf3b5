"""The L2 norm over many tensors, which every step takes of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

_SHORT = 4096  # elements
# A power of two, so that scaling does not round. Norms whose squares overflow float32 are above 2^64: the underflow of
# scaled squares is negligible next to them, and they overflow only if the norm itself does.
_SCALE = 2.0**-64


def sum_of_scalars(scalars: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sum of scalars, the same bits on every device and in every run.

    `tf.add_n` begins with an input that it may overwrite (TensorFlow 2.21, `AddNOp`). Which one it is, and with it
    the rounding, depends on what else has run. With such norms, copies of a weight were clipped differently.
    """
    return tf.reduce_sum(tf.stack(scalars))


def l2_norm(
    tensors: Sequence[tf.Tensor], squared: Callable[[Sequence[tf.Tensor]], tf.Tensor] | None = None
) -> tf.Tensor:
    """L2 norm over all tensors, even if its square overflows float32.

    Args:
      tensors: Float32 tensors.
      squared: How squares are added up; by default as TensorFlow adds them.

    Returns:
      Float32 scalar; infinite or NaN where a tensor is, or the norm exceeds float32.
    """
    squares = squared or _squared
    plain = squares(tensors)

    def scaled() -> tf.Tensor:
        # The scale is never 1 here, but it must not be a constant: XLA (TensorFlow 2.21) would square a constant by
        # itself, which gives 0, and multiply later.
        scale = tf.where(tf.math.is_finite(plain), 1.0, _SCALE)
        return tf.sqrt(squares([tensor * scale for tensor in tensors])) / _SCALE

    return tf.cond(tf.math.is_finite(plain), lambda: tf.sqrt(plain), scaled)


def squared_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Square of the L2 norm over all float32 tensors, 0 of none: a float64 scalar, which squares of float32 values do
    not overflow."""
    if not tensors:
        return tf.zeros([], tf.float64)
    return tf.square(tf.cast(l2_norm(tensors), tf.float64))


def sum_of_squares(tensors: Sequence[tf.Tensor], minus: Sequence[tf.Tensor] = ()) -> tf.Tensor:
    """Sum of squares of tensors of any size, one tensor after the other, so that one temporary tensor exists at a time.

    Args:
      tensors: Tensors.
      minus: Tensors to subtract first; none, or as many.

    Returns:
      Float64 scalar.
    """
    total = tf.zeros([], tf.float64)
    for place, tensor in enumerate(tensors):
        with tf.control_dependencies([total]):
            value = tf.cast(tensor - minus[place] if minus else tensor, tf.float32)
            total += 2.0 * tf.cast(tf.nn.l2_loss(value), tf.float64)
    return total


def _squared(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Square of the L2 norm over all tensors."""
    return 2.0 * sum_of_scalars([tf.nn.l2_loss(tensor) for tensor in tensors])


def squared_in_xla(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Square of the L2 norm for XLA, which adds up elements one by one on a CPU (TensorFlow 2.21). This adds eight at a
    time, and the remainders of all tensors together, because each separate sum takes several calls."""
    lanes, short, sums = 8, [], []
    for tensor in tensors:
        flat = tf.reshape(tensor, [-1])
        length = flat.shape[0] // lanes
        if length > lanes:
            columns = tf.split(flat[: lanes * length], lanes)
            added = tf.add_n([tf.square(column) for column in columns])
            if length > _SHORT:
                sums.append(tf.reduce_sum(added))
            else:
                short.append(added)
            flat = flat[lanes * length :]
        if flat.shape[0]:
            short.append(tf.square(flat))
    return tf.add_n([tf.reduce_sum(tf.concat(short, axis=0)), *sums]) if short else tf.add_n(sums)

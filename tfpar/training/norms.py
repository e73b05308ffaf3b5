"""The square of the L2 norm over many tensors, which every step takes of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_SHORT = 4096  # elements


def squared(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Square of the L2 norm over all tensors."""
    return 2.0 * tf.add_n([tf.nn.l2_loss(tensor) for tensor in tensors])


def squared_in_xla(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The same for XLA, which adds up one element after the other on a CPU (TensorFlow 2.21): eight at a time, and what
    is short then of all tensors together, since each sum by itself is several calls."""
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

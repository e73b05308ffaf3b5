"""Random seeds of a step, the same under every strategy."""

from __future__ import annotations

import tensorflow as tf


def step_seed(seed: int, step: tf.Tensor, replica: tf.Tensor) -> tf.Tensor:
    """The seed of one replica's share of one global batch.

    Args:
      seed: `--seed`, below 2^62.
      step: Integer scalar: number of the global batch.
      replica: Integer scalar: which share of it; under `parameter_server`, the rank whose share it is.

    Returns:
      Int32 `[2]`, for TensorFlow's stateless random ops.
    """
    folded = tf.constant([seed & 0x7FFFFFFF, seed >> 31], tf.int32)
    for part in (step, replica):
        folded = tf.random.fold_in(folded, tf.cast(part, tf.int32), alg="philox")
    return folded

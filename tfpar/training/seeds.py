"""Random seeds of a step, the same under every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.optim.keras_internals import is_seed_state
from tfpar.training.objective import Tensors

import keras
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
    folded = run_seed(seed)
    for part in (step, replica):
        folded = tf.random.fold_in(folded, tf.cast(part, tf.int32), alg="philox")
    return folded


def run_seed(seed: int) -> tf.Tensor:
    """`--seed` as int32 `[2]`."""
    return tf.constant([seed & 0x7FFFFFFF, seed >> 31], tf.int32)


def with_seed_states(
    variables: Sequence[keras.Variable], state: Sequence[Any], seed: tf.Tensor, *, salt: int
) -> Tensors:
    """`state`, the values of variables, with every seed-generator state among them drawn from `seed` and `salt`."""
    positions = [index for index, variable in enumerate(variables) if is_seed_state(variable)]
    result = list(state)
    if positions:
        draws = tf.random.stateless_uniform(
            [len(positions), 2], fold_in(seed, salt), minval=None, maxval=None, dtype=tf.int32, alg="philox"
        )
        for row, position in enumerate(positions):
            # Keras' backend keeps seeds in a wider type, and adds numbers of that type to them.
            result[position] = tf.cast(tf.bitcast(draws[row], tf.uint32), variables[position].dtype)
    return result


def fold_in(seed: tf.Tensor, data: Any) -> tf.Tensor:
    """A different seed for every value of an integer, int32 `[2]`."""
    return tf.random.fold_in(seed, data, alg="philox")

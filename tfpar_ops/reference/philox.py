"""Philox4x32-10, the counter-based random numbers of stochastic rounding, in plain integer operations.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import tensorflow as tf

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[tf.Tensor, ...], key: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
    """Four random words for each counter.

    Args:
      counter: Four uint32 tensors, shapes that broadcast; the first is the lowest word.
      key: Two uint32 tensors, likewise.

    Returns:
      Four uint32 tensors of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + tf.constant(_KEY_STEPS[0], tf.uint32), k1 + tf.constant(_KEY_STEPS[1], tf.uint32)
    return c0, c1, c2, c3


def rounding_offsets(seed_step: tf.Tensor, first_block: tf.Tensor, blocks: int, block: int) -> tf.Tensor:
    """The numbers `u` that stochastic rounding adds, as FORMAT.md assigns them to elements.

    Args:
      seed_step: int64 [2]: seed and step, 64 bits each whatever their sign.
      first_block: int64 scalar: number of the first block, counted from the start of the whole vector.
      blocks: Number of blocks.
      block: Elements in a block.

    Returns:
      int32 [blocks, block], uniform in [0, 65535].
    """
    lanes = block // 8
    numbers = tf.cast(first_block * lanes, tf.int64) + tf.range(blocks * lanes, dtype=tf.int64)
    seed_low, seed_high = _halves(seed_step[0])
    step_low, step_high = _halves(seed_step[1])
    words = philox((*_halves(numbers), step_low, step_high), (seed_low, seed_high))
    halves = []
    for word in words:
        pattern = tf.reshape(tf.bitcast(word, tf.int32), [blocks, lanes])
        halves += [pattern & 0xFFFF, tf.bitwise.right_shift(pattern, tf.constant(16)) & 0xFFFF]
    return tf.concat(halves, axis=1)


def _multiply(word: tf.Tensor, multiplier: int) -> tuple[tf.Tensor, tf.Tensor]:
    """High and low word of the 64-bit product."""
    product = tf.cast(word, tf.uint64) * tf.constant(multiplier, tf.uint64)
    high = tf.bitwise.right_shift(product, tf.constant(32, tf.uint64))
    return tf.cast(high, tf.uint32), tf.cast(product & tf.constant(0xFFFFFFFF, tf.uint64), tf.uint32)


def _halves(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Low and high uint32 of an int64."""
    mask = tf.constant(0xFFFFFFFF, tf.int64)
    low = tf.cast(number & mask, tf.uint32)
    return low, tf.cast(tf.bitwise.right_shift(number, tf.constant(32, tf.int64)) & mask, tf.uint32)

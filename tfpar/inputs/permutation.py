"""A permutation of `[0, size)` with random access: the order of an epoch, computed rather than stored.

`permute(index, size, seed, epoch)` is a generalised Feistel network (Black and Rogaway 2002,
"Ciphers with arbitrary finite domains", section 5) on the smallest grid `rows x columns` that
covers `[0, size)`. A value that falls on one of the few grid points beyond `size` passes through
the network again ("cycle walking"), which keeps the function a bijection. Round keys and the round
function are SplitMix64 (Steele, Lea and Flood 2014), so that all 64 bits of seed and epoch count.

Why not `tf.random.experimental.index_shuffle`: in TensorFlow 2.21 it returns duplicates when the
size is 4^k + 1 (65,537 for example: it takes ceil(log2(size - 1)) for the number of bits), and it
uses only the low 8 bits of each seed word for up to 65,536 examples, so epochs repeat with a
period of 256. Its output may also change with TensorFlow; this file fixes the order, so a run that
resumes under another version continues in the same order.
"""

from __future__ import annotations

import math

import tensorflow as tf

ROUNDS = 6
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix64(value: int) -> int:
    """SplitMix64's output function on a Python integer: a bijection of 64-bit integers that mixes their bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK
    return value ^ (value >> 31)


def hash64(value: tf.Tensor) -> tf.Tensor:
    """`mix64` on a uint64 tensor of any shape."""
    shift = tf.bitwise.right_shift
    value = (value ^ shift(value, _u64(30))) * _u64(_MIX[0])
    value = (value ^ shift(value, _u64(27))) * _u64(_MIX[1])
    return value ^ shift(value, _u64(31))


def permute(index: tf.Tensor, size: int, seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Maps each index through the permutation of `[0, size)` for this seed and epoch.

    Args:
      index: int64 of any shape, every value in `[0, size)`.
      size: Number of items, at least 1.
      seed: Any Python integer; only its low 64 bits count.
      epoch: int64, broadcastable to `index`; each epoch has its own permutation.

    Returns:
      int64 of the shape of `index`: values in `[0, size)`, distinct for distinct indices of
      one epoch.
    """
    if size == 1:
        return tf.zeros_like(index)
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    value = _walk(index, epoch, *map(_u64, (mix64(seed), size, rows, columns)))
    value.set_shape(index.shape)
    return value


# Traced once in a process, with sizes as arguments: these operations are half of an input pipeline's.
@tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.int64)] * 2 + [tf.TensorSpec([], tf.uint64)] * 4)
def _walk(
    index: tf.Tensor, epoch: tf.Tensor, seed: tf.Tensor, size: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor
) -> tf.Tensor:
    keys = _round_keys(seed, epoch)

    def walk(pending: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        value = tf.where(pending, _network(value, rows, columns, keys), value)
        return value >= size, value

    start = tf.ones_like(index, dtype=tf.bool)
    _, value = tf.while_loop(lambda pending, _: tf.reduce_any(pending), walk, (start, tf.cast(index, tf.uint64)))
    return tf.cast(value, tf.int64)


def _network(value: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor, keys: list[tf.Tensor]) -> tf.Tensor:
    """One pass through the Feistel network, a bijection of `[0, rows * columns)`."""
    left, right = value // columns, value % columns
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _round_function(right, key)) % rows
        else:
            right = (right + _round_function(left, key)) % columns
    return left * columns + right


def _round_function(value: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    # The upper 32 bits are the better half of a multiplicative hash, and the sum cannot overflow.
    return tf.bitwise.right_shift(hash64(value * _u64(_GOLDEN) + key), _u64(32))


def _round_keys(seed: tf.Tensor, epoch: tf.Tensor) -> list[tf.Tensor]:
    """Returns the keys of an epoch: `ROUNDS` outputs of SplitMix64 per epoch, started at the mixed seed."""
    counter = tf.cast(epoch, tf.uint64) * _u64(ROUNDS)
    return [hash64(seed + (counter + _u64(number + 1)) * _u64(_GOLDEN)) for number in range(ROUNDS)]


def _u64(value: int) -> tf.Tensor:
    return tf.constant(value & _MASK, tf.uint64)

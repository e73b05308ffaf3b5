"""Random numbers that do not depend on how environments are split over replicas.

The numbers of an environment must not depend on how many others are on the same replica. Each number is a hash of the
environment's index among all environments, the time, a stream and the seed.

Shapes: n environments; k numbers for each, which choose among L.
"""

from __future__ import annotations

import tensorflow as tf

_MULTIPLIER, _INCREMENT = 1664525, 1013904223
# The streams, one per purpose of the numbers.
RESET, STEP, ACTION, ORDER, ROTATION, REPLAY = range(6)
_WORDS = 4  # 32-bit words per hash


def uniforms(count: int, *, seed: tf.Tensor, stream: int, index: tf.Tensor, time: tf.Tensor) -> list[tf.Tensor]:
    """Returns uniform numbers in [0, 1), multiples of 2^-24.

    The hash is `pcg4d` (Jarzynski and Olano 2020, Hash Functions for GPU Rendering), which maps four words to four
    words. It takes about five integer operations per number, which XLA fuses with the operations that use it.

    Args:
      count: Number of random numbers per environment.
      seed: Int32 `[2]`.
      stream: The stream, one of the constants of this module.
      index: Int32 `[n]`: indices of the environments, from 0.
      time: Int32 scalar, or `[n]`.

    Returns:
      `count` tensors, float32 `[n]`.
    """
    numbers: list[tf.Tensor] = []
    words = tf.bitcast(seed, tf.uint32)
    time = tf.broadcast_to(tf.bitcast(time, tf.uint32), tf.shape(index))
    for block in range(-(-count // _WORDS)):
        salt = tf.constant(stream * 0x10000 + block, tf.uint32)
        key = [tf.broadcast_to(part, tf.shape(index)) for part in (words[0], words[1] + salt)]
        hashed = _pcg4d([tf.bitcast(index, tf.uint32), time, *key])
        numbers += [tf.cast(tf.bitwise.right_shift(word, _shift(8)), tf.float32) * 2.0**-24 for word in hashed]
    return numbers[:count]


def normals(count: int, *, seed: tf.Tensor, stream: int, index: tf.Tensor, time: tf.Tensor) -> list[tf.Tensor]:
    """Returns normally distributed numbers (Box and Muller 1958); arguments and result are those of `uniforms`."""
    pairs = uniforms(2 * -(-count // 2), seed=seed, stream=stream, index=index, time=time)
    numbers = []
    for first, second in zip(pairs[0::2], pairs[1::2], strict=True):
        radius = tf.sqrt(-2.0 * tf.math.log(1.0 - first))
        angle = 6.283185307179586 * second
        numbers += [radius * tf.cos(angle), radius * tf.sin(angle)]
    return numbers[:count]


def upper_bound(ends: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Returns how many of the ends of its column do not exceed each place, int32 `[k, n]`.

    `tf.searchsorted` compares every place with every end where XLA compiles it (TensorFlow 2.21); this is a binary
    search everywhere.

    Args:
      ends: Float32 `[L, n]`, ascending in each column, L static.
      places: Float32 `[k, n]`.
    """
    size, columns = ends.shape[0], tf.shape(ends, tf.int64)[1]
    flat, column = tf.reshape(ends, [-1]), tf.range(columns)
    found = tf.zeros_like(places, tf.int64)  # TensorFlow 2.21 computes with int32 on the host
    for bit in reversed(range(size.bit_length())):
        probe = found + 2**bit
        end = tf.gather(flat, (tf.minimum(probe, size) - 1) * columns + column)
        found = tf.where((probe <= size) & (end <= places), probe, found)
    return tf.cast(found, tf.int32)


def _pcg4d(words: list[tf.Tensor]) -> list[tf.Tensor]:
    x, y, z, w = (word * tf.constant(_MULTIPLIER, tf.uint32) + tf.constant(_INCREMENT, tf.uint32) for word in words)
    x, y, z, w = _mixed(x, y, z, w)
    x, y, z, w = (tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, _shift(16))) for word in (x, y, z, w))
    return [*_mixed(x, y, z, w)]


def _mixed(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor, w: tf.Tensor) -> tuple[tf.Tensor, ...]:
    x += y * w
    y += z * x
    z += x * y
    w += y * z
    return x, y, z, w


def _shift(bits: int) -> tf.Tensor:
    return tf.constant(bits, tf.uint32)

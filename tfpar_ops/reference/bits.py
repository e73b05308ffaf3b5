"""Floats as bit patterns: the roundings of FORMAT.md, and codes packed into words, in integer operations.

Integers are used on purpose. A compiler may carry more precision than it was asked for through a pair of conversions
(XLA's `xla_allow_excess_precision`) or fuse a product with a sum, and threads differ in what they do with denormals;
none of that touches an int32 tensor. Bit patterns, codes and words are all int32 here.
"""

from __future__ import annotations

import tensorflow as tf

SIGN = -(1 << 31)
MAGNITUDE = 0x7FFFFFFF
MANTISSA = 0x007FFFFF
INFINITY = 0x7F800000
SMALLEST_NORMAL = 0x00800000
NAN = 0x7FC00000

HALF_NAN = 0x7E00
_HALF_LARGEST = 0x7BFF
_HALF_SMALLEST_NORMAL = 113 << 23  # 2^-14 as float32

BF16_NAN = 0x7FC0
_BF16_LARGEST = 0x7F7F
_SHORT_LARGEST = 0x7F7FFF80

E4M3_NAN = 0x7F
_E4M3_SMALLEST_NORMAL = 121 << 23  # 2^-6 as float32


def of(values: tf.Tensor) -> tf.Tensor:
    """Bit patterns (int32) of float32 values."""
    return tf.bitcast(values, tf.int32)


def as_float(patterns: tf.Tensor) -> tf.Tensor:
    """The float32 values that have these bit patterns (int32)."""
    return tf.bitcast(patterns, tf.float32)


def left(patterns: tf.Tensor, places: int | tf.Tensor) -> tf.Tensor:
    """Patterns shifted to the left; `places` broadcasts."""
    return tf.bitwise.left_shift(patterns, tf.constant(places) if isinstance(places, int) else places)


def right(patterns: tf.Tensor, places: int | tf.Tensor) -> tf.Tensor:
    """Patterns shifted to the right, copies of the sign moving in; `places` broadcasts."""
    return tf.bitwise.right_shift(patterns, tf.constant(places) if isinstance(places, int) else places)


def magnitude(patterns: tf.Tensor) -> tf.Tensor:
    """Patterns without their sign: as integers, they have the order of the absolute values, NaN being the largest."""
    return patterns & MAGNITUDE


def flush(values: tf.Tensor) -> tf.Tensor:
    """`flush` of FORMAT.md: +0 in place of denormals and of -0, other values as they are."""
    patterns = of(values)
    return as_float(tf.where((patterns & INFINITY) == 0, 0, patterns))


def zero_denormals(values: tf.Tensor) -> tf.Tensor:
    """Values as an operation sees them, and gives them, that has no denormals: zeros of the same sign instead."""
    patterns = of(values)
    return as_float(tf.where((patterns & INFINITY) == 0, patterns & SIGN, patterns))


def add(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Sum of float32 values without denormals, whatever the thread's or the compiler's mode."""
    return zero_denormals(zero_denormals(first) + zero_denormals(second))


def nearest_even(patterns: tf.Tensor, dropped: int) -> tf.Tensor:
    """Unsigned patterns with the last `dropped` bits rounded away, to nearest even; not shifted.

    A carry into the exponent is the right result: the next power of two.
    """
    half = (1 << (dropped - 1)) - 1
    return (patterns + half + (right(patterns, dropped) & 1)) & -(1 << dropped)


def bf16(patterns: tf.Tensor) -> tf.Tensor:
    """Codes of bf16(v), 16 bits, for the patterns of v: finite values saturate, all others are one NaN."""
    size = magnitude(patterns)
    code = tf.minimum(right(nearest_even(size, 16), 16), _BF16_LARGEST)
    return tf.where(size >= INFINITY, BF16_NAN, code | (right(patterns, 16) & 0x8000))


def bf16_value(codes: tf.Tensor) -> tf.Tensor:
    """Values (float32) of bf16 codes."""
    return as_float(left(codes, 16))


def short(size: tf.Tensor) -> tf.Tensor:
    """Patterns of short(s), for patterns of s >= 0: 17 significant bits, saturating; NaN for what is not finite."""
    return tf.where(size >= INFINITY, NAN, tf.minimum(nearest_even(size, 7), _SHORT_LARGEST))


def half(patterns: tf.Tensor) -> tf.Tensor:
    """Codes of IEEE half precision for the patterns of v: finite values saturate, all others are one NaN."""
    size = magnitude(patterns)
    normal = tf.minimum(right(nearest_even(size, 13), 13) - (112 << 10), _HALF_LARGEST)
    # Below 2^-14 half precision is a fixed point of 2^-24. (The product is exact; larger values are not used.)
    denormal = tf.cast(tf.round(as_float(tf.minimum(size, _HALF_SMALLEST_NORMAL)) * 2.0**24), tf.int32)
    code = tf.where(size < _HALF_SMALLEST_NORMAL, denormal, normal)
    return tf.where(size >= INFINITY, HALF_NAN, code | (right(patterns, 16) & 0x8000))


def half_value(codes: tf.Tensor) -> tf.Tensor:
    """Values (float32) of half-precision codes."""
    size = codes & 0x7FFF
    normal = left(size, 13) + tf.where(size >= 0x7C00, 224 << 23, 112 << 23)
    denormal = of(tf.cast(size & 0x3FF, tf.float32) * 2.0**-24)
    return as_float(tf.where(size < 0x0400, denormal, normal) | left(codes & 0x8000, 16))


def e4m3(patterns: tf.Tensor) -> tf.Tensor:
    """Codes of E4M3 for the patterns of t, |t| <= 448. Zero has no sign."""
    size = magnitude(patterns)
    normal = right(nearest_even(size, 20), 20) - (120 << 3)
    denormal = tf.cast(tf.round(as_float(tf.minimum(size, _E4M3_SMALLEST_NORMAL)) * 2.0**9), tf.int32)
    code = tf.where(size < _E4M3_SMALLEST_NORMAL, denormal, normal)
    return tf.where(code == 0, 0, code | (right(patterns, 24) & 0x80))


def e4m3_value(codes: tf.Tensor) -> tf.Tensor:
    """Values (float32) of E4M3 codes."""
    size = codes & 0x7F
    normal = left(size, 20) + (120 << 23)
    denormal = of(tf.cast(size & 7, tf.float32) * 2.0**-9)
    pattern = tf.where(size < 8, denormal, normal) | left(codes & 0x80, 24)
    return as_float(tf.where(size == E4M3_NAN, NAN, pattern))


def pack(codes: tf.Tensor, width: int) -> tf.Tensor:
    """Codes of 8 or 16 bits, little-endian, in words of 32.

    Args:
      codes: int32 [rows, n], none wider than `width`; n a multiple of the codes in a word.
      width: Bits of a code.

    Returns:
      int32 [rows, n * width / 32].
    """
    per_word = 32 // width
    parts = tf.reshape(codes, [codes.shape[0], codes.shape[1] // per_word, per_word])
    return tf.reduce_sum(left(parts, tf.range(per_word) * width), axis=2)


def unpack(words: tf.Tensor, width: int) -> tf.Tensor:
    """Inverse of `pack`: int32 [rows, n] to int32 [rows, n * 32 / width], not negative."""
    per_word = 32 // width
    parts = right(words[:, :, tf.newaxis], tf.range(per_word) * width) & ((1 << width) - 1)
    return tf.reshape(parts, [words.shape[0], words.shape[1] * per_word])


def pack_planes(codes: tf.Tensor, width: int) -> tf.Tensor:
    """Codes of 1, 2, 4 or 8 bits in words: with m bytes in a row, byte j holds codes j, j + m, ..., lowest bits first.

    Args:
      codes: int32 [rows, n], none wider than `width`; n a multiple of the codes in a word.
      width: Bits of a code.

    Returns:
      int32 [rows, n * width / 32].
    """
    planes = 8 // width
    parts = tf.reshape(codes, [codes.shape[0], planes, codes.shape[1] // planes])
    places = tf.reshape(tf.range(planes) * width, [planes, 1])
    return pack(tf.reduce_sum(left(parts, places), axis=1), 8)


def unpack_planes(words: tf.Tensor, width: int) -> tf.Tensor:
    """Inverse of `pack_planes`: int32 [rows, n] to int32 [rows, n * 32 / width], not negative."""
    planes = 8 // width
    numbers = unpack(words, 8)
    places = tf.reshape(tf.range(planes) * width, [planes, 1])
    parts = right(numbers[:, tf.newaxis, :], places) & ((1 << width) - 1)
    return tf.reshape(parts, [numbers.shape[0], numbers.shape[1] * planes])

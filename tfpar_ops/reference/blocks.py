"""What each codec makes of a block, and back: FORMAT.md, "Arithmetic". Rows are blocks, [blocks, B] throughout.

Between the values of a block and its bytes stand its *codes* (int32, one an element; for topk, positions and values)
and its *scale* (int32, the pattern that is stored).
"""

from __future__ import annotations

from typing import NamedTuple

from tfpar_ops.codecs import Codec
from tfpar_ops.reference import bits

import numpy as np
import tensorflow as tf

# The largest scale, 2^126. Those up to 2^-126 are 0: the reciprocal of every other is a normal number.
_LARGEST_SCALE = 253 << 23


class Codes(NamedTuple):
    """Blocks as they are stored.

    Attributes:
      codes: int32 [blocks, codes of a block]; negative ones only in 8-bit quantisation.
      scales: int32 [blocks], patterns as wide as the codec's scales; None where it has none.
    """

    codes: tf.Tensor
    scales: tf.Tensor | None


def encode(codec: Codec, v: tf.Tensor, elements: int, offsets: tf.Tensor | None) -> Codes:
    """Codes of blocks.

    Args:
      codec: The codec.
      v: float32 [blocks, B], flushed; what lies past the end is 0.
      elements: How many of these elements exist; the rest, at the end, is padding.
      offsets: int32 [blocks, B], the random numbers of stochastic rounding; None for nearest.

    Returns:
      Codes and scales.
    """
    patterns = bits.of(v)
    if codec.kind == "bf16":
        return Codes(bits.bf16(patterns), None)
    if codec.kind == "fp16":
        return Codes(bits.half(patterns), None)
    if codec.kind == "fp8":
        return _encode_fp8(v, patterns)
    if codec.kind == "quantize":
        return _encode_quantize(codec, v, patterns, offsets)
    if codec.kind == "sign":
        return _encode_sign(codec, v, elements)
    return _encode_topk(codec, patterns)


def decode(codec: Codec, stored: Codes) -> tuple[tf.Tensor, tf.Tensor]:
    """Values of stored blocks.

    Args:
      codec: The codec.
      stored: Its codes and scales, of any content.

    Returns:
      Values, float32 [blocks, B]; and whether all positions were valid, bool scalar.
    """
    codes = stored.codes
    if codec.kind == "topk":
        return _decode_topk(codec, codes)
    if codec.kind == "bf16":
        values = bits.bf16_value(codes)
    elif codec.kind == "fp16":
        values = bits.half_value(codes)
    elif codec.kind == "fp8":
        values = _decode_fp8(codes, stored.scales)
    elif codec.kind == "quantize":
        values = tf.cast(codes - _zero_code(codec), tf.float32) * _scale_value(codec, stored.scales)[:, tf.newaxis]
    else:
        scale = bits.of(_scale_value(codec, stored.scales))[:, tf.newaxis]
        # Where the scale is 0 so is the value, without a sign.
        values = bits.as_float(tf.where(scale == 0, 0, tf.bitwise.bitwise_xor(scale, bits.left(codes, 31))))
    return values, tf.constant(True)


def pack(codec: Codec, codes: tf.Tensor) -> tf.Tensor:
    """Codes of a block as words: int32 [blocks, block_bytes / 4]."""
    width = _code_bits(codec)
    return bits.pack(codes, width) if width == 16 else bits.pack_planes(codes & ((1 << width) - 1), width)


def unpack(codec: Codec, words: tf.Tensor) -> tf.Tensor:
    """Inverse of `pack`."""
    width = _code_bits(codec)
    codes = bits.unpack(words, width) if width == 16 else bits.unpack_planes(words, width)
    if codec.kind == "quantize" and codec.bits == 8:
        return bits.right(bits.left(codes, 24), 24)  # two's complement
    return codes


def _code_bits(codec: Codec) -> int:
    return {"bf16": 16, "fp16": 16, "topk": 16, "fp8": 8, "quantize": codec.bits, "sign": 1}[codec.kind]


def _is_not_finite(size: tf.Tensor) -> tf.Tensor:
    """Whether a block holds a NaN or an infinity, from its largest magnitude pattern."""
    return size >= bits.INFINITY


# Scales


def _scale(codec: Codec, s: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
    """Stored patterns of the scales of s >= 0; NaN for the bad blocks."""
    patterns = tf.where(bad, bits.NAN, bits.of(s))
    shift = 0 if codec.scale == "float32" else 16
    rounded = bits.short(patterns) if shift == 0 else bits.bf16(patterns)
    capped = tf.minimum(rounded, _LARGEST_SCALE >> shift)
    return tf.where(bad, bits.NAN >> shift, tf.where(capped <= (bits.SMALLEST_NORMAL >> shift), 0, capped))


def _scale_value(codec: Codec, scales: tf.Tensor) -> tf.Tensor:
    return bits.flush(bits.as_float(scales) if codec.scale == "float32" else bits.bf16_value(scales))


# fp8

_LARGEST_FP8 = 0x7F600000  # 448 2^119; what is larger could be rounded to 2^128, infinity


def _encode_fp8(v: tf.Tensor, patterns: tf.Tensor) -> Codes:
    largest = tf.reduce_max(bits.magnitude(patterns), axis=1)
    bad = largest > _LARGEST_FP8
    exponent = bits.right(largest, 23) - 8 + tf.cast((largest & bits.MANTISSA) > 0x600000, tf.int32)
    scale = tf.where(bad, 255, tf.where(largest == 0, 0, tf.maximum(exponent, 1)))
    multiplier = bits.as_float(bits.left(254 - tf.where(bad, 127, scale), 23))
    scaled = tf.where(bad[:, tf.newaxis], 0.0, v) * multiplier[:, tf.newaxis]
    return Codes(bits.e4m3(bits.of(scaled)), scale)


def _decode_fp8(codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    power = bits.as_float(bits.left(tf.where(scales == 255, 0, scales), 23))
    values = bits.flush(bits.e4m3_value(codes) * power[:, tf.newaxis])
    return bits.as_float(tf.where((scales == 255)[:, tf.newaxis], bits.NAN, bits.of(values)))


# quantize


def _zero_code(codec: Codec) -> int:
    return {8: 0, 4: 8, 2: 2}[codec.bits]


def _encode_quantize(codec: Codec, v: tf.Tensor, patterns: tf.Tensor, offsets: tf.Tensor | None) -> Codes:
    levels = 2 ** (codec.bits - 1) - 1
    largest = tf.reduce_max(bits.magnitude(patterns), axis=1)
    bad = _is_not_finite(largest)
    stored = _scale(codec, bits.as_float(largest) * (np.float32(1) / np.float32(levels)), bad)
    scale = tf.where(bad, 0.0, _scale_value(codec, stored))
    inverse = tf.where(scale == 0, 0.0, 1.0 / tf.where(scale == 0, 1.0, scale))
    ratio = tf.where(bad[:, tf.newaxis], 0.0, v) * inverse[:, tf.newaxis]
    if offsets is None:
        q = tf.cast(tf.round(ratio), tf.int32)
    else:
        q = bits.right(tf.cast(tf.round(ratio * 65536.0), tf.int32) + offsets, 16)
    return Codes(tf.clip_by_value(q, -levels, levels) + _zero_code(codec), stored)


# sign


def _encode_sign(codec: Codec, v: tf.Tensor, elements: int) -> Codes:
    blocks = v.shape[0]
    total = bits.as_float(bits.magnitude(bits.of(v)))
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    total = total[:, 0]
    # All blocks are full but the last that has elements. A block of padding alone has a total of 0, any factor will do.
    full, rest = divmod(elements, codec.block)
    shares = np.float32(1) / np.array([codec.block, max(rest, 1)], np.float32)
    share = tf.where(tf.range(blocks) < full, shares[0], shares[1])
    stored = _scale(codec, total * share, _is_not_finite(bits.of(total)))
    return Codes(tf.cast(v < 0, tf.int32), stored)


# topk


def _encode_topk(codec: Codec, patterns: tf.Tensor) -> Codes:
    # Of equal ones the first is chosen: tf.math.top_k promises the lower index. It gets floats, for which XLA has
    # something better than sorting everything, and no NaN, whose order nobody promises.
    size = bits.as_float(tf.minimum(bits.magnitude(patterns), bits.INFINITY))
    largest, chosen = tf.math.top_k(size, codec.keep)
    bad = _is_not_finite(bits.of(largest[:, :1]))
    positions = tf.where(bad, tf.range(codec.keep), tf.sort(chosen, axis=1))
    values = tf.where(bad, bits.BF16_NAN, bits.bf16(tf.gather(patterns, positions, batch_dims=1)))
    return Codes(tf.concat([positions, values], axis=1), None)


def _decode_topk(codec: Codec, codes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    blocks = codes.shape[0]
    positions, values = codes[:, : codec.keep], bits.bf16_value(codes[:, codec.keep :])
    bad = bits.magnitude(bits.of(values[:, :1])) > bits.INFINITY
    rows = tf.broadcast_to(tf.range(blocks)[:, tf.newaxis], positions.shape)
    # A position past the block makes the whole payload invalid; it must not reach the scatter all the same.
    places = tf.stack([rows, tf.minimum(positions, codec.block - 1)], axis=2)
    dense = tf.scatter_nd(places, values, [blocks, codec.block])
    dense = bits.as_float(tf.where(bad, bits.NAN, bits.of(dense)))
    return dense, tf.reduce_all(positions < codec.block)

"""Blocks of any codec and their codes: FORMAT.md, "Arithmetic". Rows are blocks, [blocks, B] throughout.

Each format has a module beside this one (`Format.reference`), with an `encode` and a `decode` that those here call.
Between the values of a block and its bytes stand its *codes* (int32, one an element; for topk, positions and values)
and its *scale* (int32, the pattern that is stored).
"""

from __future__ import annotations

from typing import NamedTuple

from tfpar_ops.codecs import Codec
from tfpar_ops.reference import bits

import tensorflow as tf

# The largest scale, 2^126. Those up to 2^-126 are 0: the reciprocal of every other is a normal number.
_LARGEST_SCALE = 253 << 23


class Codes(NamedTuple):
    """Blocks as they are stored.

    Attributes:
      codes: int32 [blocks, codes of a block]; negative ones only of int8.
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
    codes: Codes = codec.format.reference.encode(codec, v, elements, offsets)
    return codes


def decode(codec: Codec, stored: Codes) -> tf.Tensor:
    """Values of stored blocks.

    Args:
      codec: The codec.
      stored: Its codes and scales, of any content.

    Returns:
      Values, float32 [blocks, B]. A position that is not below B counts as B - 1, see `positions_valid`.
    """
    values: tf.Tensor = codec.format.reference.decode(codec, stored)
    return values


def positions_valid(codec: Codec, stored: Codes) -> tf.Tensor:
    """Whether all positions of stored blocks are below the block size, bool scalar; true where there are none."""
    if not codec.format.keeps:
        return tf.constant(True)
    return tf.reduce_all(stored.codes[:, : codec.keep] < codec.block)


def pack(codec: Codec, codes: tf.Tensor) -> tf.Tensor:
    """Codes of a block as words: int32 [blocks, block_bytes / 4]."""
    width = _field_bits(codec)
    return bits.pack(codes, width) if width == 16 else bits.pack_planes(codes & ((1 << width) - 1), width)


def unpack(codec: Codec, words: tf.Tensor) -> tf.Tensor:
    """Inverse of `pack`; no code is negative."""
    width = _field_bits(codec)
    return bits.unpack(words, width) if width == 16 else bits.unpack_planes(words, width)


def _field_bits(codec: Codec) -> int:
    # Positions and values, 16 bits each, are codes of their own here.
    return 16 if codec.format.keeps else codec.format.code_bits


def is_not_finite(size: tf.Tensor) -> tf.Tensor:
    """Whether a block holds a NaN or an infinity, from its largest magnitude pattern."""
    return size >= bits.INFINITY


def scale_pattern(codec: Codec, s: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
    """Stored patterns of the scales of s >= 0; NaN for the bad blocks."""
    patterns = tf.where(bad, bits.NAN, bits.of(s))
    shift = 0 if codec.scale == "float32" else 16
    rounded = bits.short(patterns) if shift == 0 else bits.bf16(patterns)
    capped = tf.minimum(rounded, _LARGEST_SCALE >> shift)
    return tf.where(bad, bits.NAN >> shift, tf.where(capped <= (bits.SMALLEST_NORMAL >> shift), 0, capped))


def scale_value(codec: Codec, scales: tf.Tensor) -> tf.Tensor:
    """Values of stored patterns."""
    return bits.flush(bits.as_float(scales) if codec.scale == "float32" else bits.bf16_value(scales))

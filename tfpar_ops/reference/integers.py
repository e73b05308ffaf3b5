"""Symmetric integers of 8, 4 and 2 bits with a scale per block, nearest or stochastic."""

from __future__ import annotations

from tfpar_ops.codecs import Codec
from tfpar_ops.reference import bits
from tfpar_ops.reference.blocks import Codes, is_not_finite, scale_pattern, scale_value

import numpy as np
import tensorflow as tf


def encode(codec: Codec, v: tf.Tensor, elements: int, offsets: tf.Tensor | None) -> Codes:
    """See `blocks.encode`."""
    levels = 2 ** (codec.format.code_bits - 1) - 1
    largest = tf.reduce_max(bits.magnitude(bits.of(v)), axis=1)
    bad = is_not_finite(largest)
    stored = scale_pattern(codec, bits.as_float(largest) * (np.float32(1) / np.float32(levels)), bad)
    scale = tf.where(bad, 0.0, scale_value(codec, stored))
    inverse = tf.where(scale == 0, 0.0, 1.0 / tf.where(scale == 0, 1.0, scale))
    ratio = tf.where(bad[:, tf.newaxis], 0.0, v) * inverse[:, tf.newaxis]
    if offsets is None:
        q = tf.cast(tf.round(ratio), tf.int32)
    else:
        q = bits.right(tf.cast(tf.round(ratio * 65536.0), tf.int32) + offsets, 16)
    return Codes(tf.clip_by_value(q, -levels, levels) + _zero_code(codec), stored)


def decode(codec: Codec, stored: Codes) -> tf.Tensor:
    """See `blocks.decode`."""
    codes = stored.codes
    if codec.format.code_bits == 8:
        codes = bits.right(bits.left(codes, 24), 24)  # two's complement
    return tf.cast(codes - _zero_code(codec), tf.float32) * scale_value(codec, stored.scales)[:, tf.newaxis]


def _zero_code(codec: Codec) -> int:
    return {8: 0, 4: 8, 2: 2}[codec.format.code_bits]

"""fp8 (E4M3) with a power of two as the scale of each block."""

from __future__ import annotations

from tfpar_ops.codecs import Codec
from tfpar_ops.reference import bits
from tfpar_ops.reference.blocks import Codes

import tensorflow as tf

_LARGEST = 0x7F600000  # 448 2^119; what is larger could be rounded to 2^128, infinity


def encode(codec: Codec, v: tf.Tensor, elements: int, offsets: tf.Tensor | None) -> Codes:
    """See `blocks.encode`."""
    largest = tf.reduce_max(bits.magnitude(bits.of(v)), axis=1)
    bad = largest > _LARGEST
    exponent = bits.right(largest, 23) - 8 + tf.cast((largest & bits.MANTISSA) > 0x600000, tf.int32)
    scale = tf.where(bad, 255, tf.where(largest == 0, 0, tf.maximum(exponent, 1)))
    multiplier = bits.as_float(bits.left(254 - tf.where(bad, 127, scale), 23))
    scaled = tf.where(bad[:, tf.newaxis], 0.0, v) * multiplier[:, tf.newaxis]
    return Codes(bits.e4m3(bits.of(scaled)), scale)


def decode(codec: Codec, stored: Codes) -> tf.Tensor:
    """See `blocks.decode`."""
    bad = tf.equal(stored.scales, 255)
    power = bits.as_float(bits.left(tf.where(bad, 0, stored.scales), 23))
    values = bits.flush(bits.e4m3_value(stored.codes) * power[:, tf.newaxis])
    return bits.as_float(tf.where(bad[:, tf.newaxis], bits.NAN, bits.of(values)))

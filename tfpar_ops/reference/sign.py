"""One bit for each element, and their mean magnitude as the scale of a block."""

from __future__ import annotations

from tfpar_ops.codecs import Codec
from tfpar_ops.reference import bits
from tfpar_ops.reference.blocks import Codes, is_not_finite, scale_pattern, scale_value

import numpy as np
import tensorflow as tf


def encode(codec: Codec, v: tf.Tensor, elements: int, offsets: tf.Tensor | None) -> Codes:
    """See `blocks.encode`."""
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
    stored = scale_pattern(codec, total * share, is_not_finite(bits.of(total)))
    return Codes(tf.cast(v < 0, tf.int32), stored)


def decode(codec: Codec, stored: Codes) -> tf.Tensor:
    """See `blocks.decode`."""
    scale = bits.of(scale_value(codec, stored.scales))[:, tf.newaxis]
    # Where the scale is 0 so is the value, without a sign.
    return bits.as_float(tf.where(scale == 0, 0, tf.bitwise.bitwise_xor(scale, bits.left(stored.codes, 31))))

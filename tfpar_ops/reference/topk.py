"""The largest elements of each block, with their positions."""

from __future__ import annotations

from tfpar_ops.codecs import Codec
from tfpar_ops.reference import bits
from tfpar_ops.reference.blocks import Codes, is_not_finite

import tensorflow as tf


def encode(codec: Codec, v: tf.Tensor, elements: int, offsets: tf.Tensor | None) -> Codes:
    """See `blocks.encode`."""
    patterns = bits.of(v)
    # Of equal ones the first is chosen: tf.math.top_k promises the lower index. It gets floats, for which XLA has
    # something better than sorting everything, and no NaN, whose order nobody promises.
    size = bits.as_float(tf.minimum(bits.magnitude(patterns), bits.INFINITY))
    largest, chosen = tf.math.top_k(size, codec.keep)
    bad = is_not_finite(bits.of(largest[:, :1]))
    positions = tf.where(bad, tf.range(codec.keep), tf.sort(chosen, axis=1))
    values = tf.where(bad, bits.BF16_NAN, bits.bf16(tf.gather(patterns, positions, batch_dims=1)))
    return Codes(tf.concat([positions, values], axis=1), None)


def decode(codec: Codec, stored: Codes) -> tf.Tensor:
    """See `blocks.decode`."""
    codes = stored.codes
    blocks = codes.shape[0]
    positions, values = codes[:, : codec.keep], bits.bf16_value(codes[:, codec.keep :])
    bad = bits.magnitude(bits.of(values[:, :1])) > bits.INFINITY
    rows = tf.broadcast_to(tf.range(blocks)[:, tf.newaxis], positions.shape)
    # A position past the block makes the whole payload invalid; it must not reach the scatter all the same.
    places = tf.stack([rows, tf.minimum(positions, codec.block - 1)], axis=2)
    dense = tf.scatter_nd(places, values, [blocks, codec.block])
    return bits.as_float(tf.where(bad, bits.NAN, bits.of(dense)))

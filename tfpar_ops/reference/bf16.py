"""bf16: every element by itself."""

from __future__ import annotations

from tfpar_ops.codecs import Codec
from tfpar_ops.reference import bits
from tfpar_ops.reference.blocks import Codes

import tensorflow as tf


def encode(codec: Codec, v: tf.Tensor, elements: int, offsets: tf.Tensor | None) -> Codes:
    """See `blocks.encode`."""
    return Codes(bits.bf16(bits.of(v)), None)


def decode(codec: Codec, stored: Codes) -> tf.Tensor:
    """See `blocks.decode`."""
    return bits.bf16_value(stored.codes)

"""Payloads from blocks, and blocks from payloads: FORMAT.md, "Layout"."""

from __future__ import annotations

from tfpar_ops.codecs import HEADER_BYTES, Codec
from tfpar_ops.reference import bits, blocks

import numpy as np
import tensorflow as tf

_HEADER_WORDS = HEADER_BYTES // 4


def assemble(codec: Codec, stored: blocks.Codes, shards: int, elements: int) -> tf.Tensor:
    """Payloads of shards that have the same number of elements.

    Args:
      codec: The codec.
      stored: Blocks of all shards, one shard after the other.
      shards: Number of shards.
      elements: Elements of a shard, as the header says.

    Returns:
      int32 [shards, words].
    """
    per_shard = codec.blocks(elements)
    codes = blocks.pack(codec, stored.codes)
    header = np.frombuffer(codec.header(elements), "<i4")
    parts = [
        tf.broadcast_to(header, [shards, _HEADER_WORDS]),
        tf.reshape(codes, [shards, per_shard * codec.block_bytes // 4]),
    ]
    if stored.scales is not None:
        scales = tf.reshape(stored.scales, [shards, per_shard])
        per_word = 4 // codec.scale_bytes
        scales = tf.pad(scales, [[0, 0], [0, -per_shard % per_word]])
        parts.append(scales if per_word == 1 else bits.pack(scales, 8 * codec.scale_bytes))
    words = codec.payload_bytes(elements) // 4
    parts.append(tf.zeros([shards, words - sum(part.shape[1] for part in parts)], tf.int32))
    return tf.concat(parts, axis=1)


def take_apart(codec: Codec, payloads: tf.Tensor, elements: int) -> blocks.Codes:
    """Inverse of `assemble`: the blocks of all payloads, one payload after the other. The header is not looked at."""
    count, per_payload = payloads.shape[0], codec.blocks(elements)
    scales_at = _HEADER_WORDS + per_payload * codec.block_bytes // 4
    words = tf.reshape(payloads[:, _HEADER_WORDS:scales_at], [count * per_payload, codec.block_bytes // 4])
    codes = blocks.unpack(codec, words)
    if not codec.scale_bytes:
        return blocks.Codes(codes, None)
    per_word = 4 // codec.scale_bytes
    scales = payloads[:, scales_at : scales_at + -(-per_payload // per_word)]
    if per_word > 1:
        scales = bits.unpack(scales, 8 * codec.scale_bytes)[:, :per_payload]
    return blocks.Codes(codes, tf.reshape(scales, [count * per_payload]))


def check_header(codec: Codec, payloads: tf.Tensor, elements: int) -> tf.Tensor:
    """Checks that every payload's header is that of this codec and this many elements.

    Returns:
      bool scalar. Where assertions run it is true; a program that XLA compiles has none.

    Raises:
      tf.errors.InvalidArgumentError: A header differs (when the operation runs).
    """
    expected = np.frombuffer(codec.header(elements), "<i4")
    headers = payloads[:, :_HEADER_WORDS]
    valid = tf.reduce_all(headers == expected)
    message = f"payload header: expected {expected.tolist()} (int32) for {elements} elements of {codec}, got"
    tf.debugging.Assert(valid, [message, headers])
    return valid


def check_positions(codec: Codec, valid: tf.Tensor) -> tf.Tensor:
    """Checks what `blocks.decode` found of positions; returns `valid`.

    Raises:
      tf.errors.InvalidArgumentError: A position of a topk payload lies outside of its block (when the operation runs).
    """
    if codec.kind == "topk":
        tf.debugging.Assert(valid, [f"payload of {codec}: a position is not below the block size, {codec.block}"])
    return valid

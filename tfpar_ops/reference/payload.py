"""Payloads from blocks, and blocks from payloads: FORMAT.md, "Layout"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar_ops.codecs import HEADER_BYTES, Codec
from tfpar_ops.reference import bits, blocks

import numpy as np
import tensorflow as tf

_HEADER_WORDS = HEADER_BYTES // 4
_FIELDS = "magic, kind, log2 of block, keep, elements"


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
    foreign = tf.reduce_any(headers != expected, axis=1)
    valid = ~tf.reduce_any(foreign)
    row = tf.argmax(tf.cast(foreign, tf.int32))  # the first of them
    message = ["payloads[", row, f"]: payload header: {_FIELDS} are ", _fields(tf.gather(headers, row)), ", expected "]
    require(valid, [*message, _fields(tf.constant(expected)), f" for {elements} elements of {codec}"])
    return valid


def _fields(header: tf.Tensor) -> tf.Tensor:
    """The numbers of a header, int64 [5], in the order of `_FIELDS`."""
    words = tf.cast(tf.bitcast(header, tf.uint32), tf.int64)
    kind, log2_block, keep = words[1] & 255, (words[1] // 2**8) & 255, words[1] // 2**16
    return tf.stack([words[0], kind, log2_block, keep, words[2] | (words[3] * 2**32)])


def check_positions(codec: Codec, stored: blocks.Codes, payloads: int) -> tf.Tensor:
    """Checks that positions lie within their blocks.

    Args:
      codec: The codec.
      stored: The blocks of all payloads, one payload after the other.
      payloads: Number of payloads.

    Returns:
      bool scalar. Where assertions run it is true.

    Raises:
      tf.errors.InvalidArgumentError: A position of a topk payload lies outside of its block (when the operation runs).
    """
    valid = blocks.positions_valid(codec, stored)
    if codec.format.keeps and stored.codes.shape[0]:
        positions = tf.reshape(stored.codes[:, : codec.keep], [-1])
        place = tf.argmax(tf.cast(positions >= codec.block, tf.int32))  # the first of them
        block, per_payload = place // codec.keep, stored.codes.shape[0] // payloads
        message = ["payloads[", block // per_payload, "]: topk position ", tf.gather(positions, place)]
        message += [", in block ", block % per_payload]
        require(valid, [*message, f", is not below the block size, {codec.block}"])
    return valid


def require(valid: tf.Tensor, message: Sequence[Any]) -> None:
    """Asserts a condition, where assertions run.

    Args:
      valid: Bool scalar.
      message: Text and tensors, joined: in plain words if called eagerly, as TensorFlow shows them from within a graph.

    Raises:
      tf.errors.InvalidArgumentError: It does not hold (in a graph, when the operation runs).
    """
    if not tf.executing_eagerly():
        tf.debugging.Assert(valid, list(message), summarize=8)
    elif not valid:
        parts = [part if isinstance(part, str) else str(part.numpy()) for part in message]
        raise tf.errors.InvalidArgumentError(None, None, "".join(parts))

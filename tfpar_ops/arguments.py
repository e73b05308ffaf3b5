"""Checks of arguments that do not depend on which implementation does the work."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar_ops.codecs import Codec

import tensorflow as tf


def elements_of(tensors: Sequence[tf.Tensor], name: str = "tensors") -> int:
    """Elements of tensors together.

    Raises:
      TypeError: A tensor is not float32.
      ValueError: A shape is not static.
    """
    total = 0
    for index, tensor in enumerate(tensors):
        if tensor.dtype != tf.float32:
            raise TypeError(f"{name}[{index}]: dtype {tensor.dtype.name}; expected float32")
        if not tensor.shape.is_fully_defined():
            raise ValueError(f"{name}[{index}]: shape {tensor.shape} is not static, the payload length follows from it")
        total += tensor.shape.num_elements()
    return total


def shard_size(codec: Codec, elements: int, shards: int, shard_elements: int | None) -> int:
    """Elements of a shard: the given number, checked; by default all for one shard, else the fewest whole blocks.

    Raises:
      ValueError: Fewer than one shard, a shard that does not end with a block, or shards that do not hold all elements.
    """
    if shards < 1:
        raise ValueError(f"shards={shards}; expected at least 1")
    if shard_elements is None:
        return elements if shards == 1 else codec.blocks(-(-elements // shards)) * codec.block
    if shards > 1 and shard_elements % codec.block:
        raise ValueError(f"shard_elements={shard_elements} is not a multiple of the block size, {codec.block}")
    if shard_elements < 0 or shards * shard_elements < elements:
        raise ValueError(f"shards={shards} of shard_elements={shard_elements} do not hold {elements} elements")
    return shard_elements


def check_residual(residual: tf.Tensor | tf.Variable | None, elements: int) -> None:
    """Checks a residual, if there is one.

    Raises:
      TypeError: It is not float32.
      ValueError: It has not as many elements as are encoded.
    """
    if residual is None:
        return
    if residual.dtype != tf.float32:
        raise TypeError(f"residual: dtype {residual.dtype.name}; expected float32")
    if residual.shape != [elements]:
        raise ValueError(f"residual: shape {residual.shape}; expected [{elements}], as many elements as are encoded")


def check_seed_step(codec: Codec, seed_step: tf.Tensor | None) -> tf.Tensor | None:
    """Seed and step of stochastic rounding as int64 [2], None for nearest.

    Raises:
      ValueError: Missing for a codec that rounds stochastically, given for one that does not, or of another shape.
    """
    if codec.rounding == "nearest":
        if seed_step is not None:
            raise ValueError("seed_step: given, but the codec rounds to nearest; leave it out")
        return None
    if seed_step is None:
        raise ValueError("seed_step: missing, the codec rounds stochastically; expected int64 [2], seed and step")
    seed_step = tf.convert_to_tensor(seed_step, tf.int64)
    if seed_step.shape != [2]:
        raise ValueError(f"seed_step: shape {seed_step.shape}; expected [2], seed and step")
    return seed_step


def check_range(codec: Codec, elements: int, begin: int | tf.Tensor, valid: int | None) -> int:
    """Checks which elements of the whole vector are encoded again, as far as that is known; returns `valid`.

    Raises:
      ValueError: `begin` is not the first element of a block, or there are more valid elements than elements.
    """
    valid = elements if valid is None else valid
    if not 0 <= valid <= elements:
        raise ValueError(f"recode: valid={valid} is not between 0 and elements={elements}")
    if isinstance(begin, int) and (begin < 0 or begin % codec.block):
        raise ValueError(f"recode: begin={begin} is not a multiple of the block size, {codec.block}")
    return valid


def check_payloads(codec: Codec, payloads: tf.Tensor, elements: int) -> None:
    """Checks what is known of payloads before their content is: dtype, rank, length.

    Raises:
      TypeError: Not int32.
      ValueError: Not a matrix of at least one payload, or not of the length that these elements have.
    """
    if payloads.dtype != tf.int32:
        raise TypeError(f"payloads: dtype {payloads.dtype.name}; expected int32")
    words = codec.payload_bytes(elements) // 4
    shape = payloads.shape
    if shape.rank != 2 or not shape.is_fully_defined() or shape[0] < 1 or shape[1] != words:
        raise ValueError(
            f"payloads: shape {shape}; expected [peers >= 1, {words}], {words} words being the payload of {elements}"
            f" elements of {codec}"
        )

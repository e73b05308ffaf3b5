"""The operations: native where the library is loaded, else those of the reference, with the same bits.

Inside a function that XLA compiles, and on TPU, call `tfpar_ops.reference` instead: XLA knows no custom operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar_ops import arguments, reference
from tfpar_ops.codecs import Codec
from tfpar_ops.library import library
from tfpar_ops.reference import Encoded

import tensorflow as tf


def library_status() -> str:
    """One line saying which implementation of the operations is in use, and why."""
    return library().status


def uses_library() -> bool:
    """Whether the native operations are in use; False for the reference."""
    return library().operations is not None


def encode(
    tensors: Sequence[tf.Tensor],
    residual: tf.Tensor | None,
    codec: Codec,
    *,
    shards: int = 1,
    shard_elements: int | None = None,
    seed_step: tf.Tensor | None = None,
    measures_norms: tf.Tensor | bool = True,
) -> Encoded:
    """Encodes tensors, seen as one vector, plus the residual.

    The tensors are read where they are, one after the other; nothing is concatenated. The new residual takes the memory
    of the old one if nothing else holds it; `encode_into` makes sure of that.

    Args:
      tensors: A list of float32 tensors of any static shapes, or what tf.convert_to_tensor makes them of; together L
        elements.
      residual: float32 [L], what earlier payloads left out; None for no error feedback.
      codec: The codec.
      shards: Number of payloads. Shard s holds elements [s S, (s + 1) S); what lies past L is padding.
      shard_elements: S, a multiple of the block size if there are several shards; by default L for one shard, else
        L / shards rounded up to whole blocks.
      seed_step: int64 [2], seed and step of stochastic rounding; None for nearest.
      measures_norms: Bool scalar; if false, the norms are NaN, and take no time on CPUs, otherwise up to half of it.

    Returns:
      Payloads int32 [shards, codec.payload_bytes(S) / 4], new residual float32 [L] (None without one), and the squared
      L2 norms of tensors and new residual, float32 [2].

    Raises:
      TypeError: A tensor has another dtype, or is none: None, tf.IndexedSlices; `codec` is no Codec.
      ValueError: A shape is not static or does not fit, the shards do not hold the vector, or `seed_step` does not go
        with the codec's rounding.
    """
    operations = library().operations
    if operations is None:
        return reference.encode(
            tensors,
            residual,
            codec,
            shards=shards,
            shard_elements=shard_elements,
            seed_step=seed_step,
            measures_norms=measures_norms,
        )
    tensors, attributes = _encoding(tensors, codec, shards, shard_elements)
    residual = arguments.residual_tensor(residual, arguments.elements_of(tensors))
    payload, new_residual, norms = operations.tfpar_encode(
        tensors=tensors,
        residual=tf.zeros([0]) if residual is None else residual,
        seed_step=_seed_step(codec, seed_step),
        measures_norms=arguments.bool_scalar("measures_norms", measures_norms),
        **attributes,
    )
    return Encoded(payload, None if residual is None else new_residual, norms)


def encode_into(
    residual: tf.Variable,
    tensors: Sequence[tf.Tensor],
    codec: Codec,
    *,
    shards: int = 1,
    shard_elements: int | None = None,
    seed_step: tf.Tensor | None = None,
    measures_norms: tf.Tensor | bool = True,
) -> Encoded:
    """As `encode`, with the residual in a variable that is updated in place: no second buffer, no copy.

    Args:
      residual: float32 variable [L]. Under a strategy, the variable of this replica. Hold no value of it that was read
        before: the update would then go to a fresh buffer.
      tensors: As for `encode`, and so are the others.
      codec: The codec.
      shards: Number of payloads.
      shard_elements: Elements of a shard.
      seed_step: int64 [2], seed and step of stochastic rounding; None for nearest.
      measures_norms: Bool scalar; if false, the norms are NaN, and take no time on CPUs, otherwise up to half of it.

    Returns:
      Payloads and squared norms as from `encode`; `residual` is None, the variable has it.

    Raises:
      TypeError: As for `encode`; or `residual` is not a tf.Variable of float32.
      ValueError: As for `encode`.
    """
    operations = library().operations
    if operations is None:
        return reference.encode_into(
            residual,
            tensors,
            codec,
            shards=shards,
            shard_elements=shard_elements,
            seed_step=seed_step,
            measures_norms=measures_norms,
        )
    tensors, attributes = _encoding(tensors, codec, shards, shard_elements)
    residual = arguments.residual_variable(residual, arguments.elements_of(tensors), "encode")
    payload, norms = operations.tfpar_encode_resource(
        tensors=tensors,
        residual=residual.handle,
        seed_step=_seed_step(codec, seed_step),
        measures_norms=arguments.bool_scalar("measures_norms", measures_norms),
        **attributes,
    )
    return Encoded(payload, None, norms)


def decode(
    payloads: tf.Tensor,
    codec: Codec,
    shapes: Sequence[Sequence[int]],
    *,
    shard_elements: int | None = None,
    factor: tf.Tensor | float = 1.0,
) -> list[tf.Tensor]:
    """Decodes the payloads of the shards of one vector.

    Args:
      payloads: int32 [shards, words].
      codec: The codec that made them.
      shapes: Shapes of the tensors that make up the vector.
      shard_elements: Elements of a shard; the default is that of `encode`.
      factor: Multiplies the result; float32 scalar.

    Returns:
      Tensors, float32, of these shapes.

    Raises:
      TypeError: The payloads are not int32.
      ValueError: A payload does not have the length that follows from codec and shapes.
      tf.errors.InvalidArgumentError: A payload is of another codec or length, or invalid. On a GPU, where that would
        mean to wait for it, the result is NaN instead.
    """
    operations = library().operations
    if operations is None:
        return reference.decode(payloads, codec, shapes, shard_elements=shard_elements, factor=factor)
    arguments.check_codec(codec)
    payloads = arguments.payload_tensor(payloads)
    outputs = arguments.static_shapes(shapes) or [tf.TensorShape([0])]
    elements = sum(shape.num_elements() for shape in outputs)
    size = arguments.shard_size(codec, elements, arguments.payload_rows(payloads), shard_elements)
    arguments.check_payloads(codec, payloads, size)
    result = operations.tfpar_decode(
        payloads=payloads,
        factor=arguments.scalar_factor(factor),
        N=len(outputs),
        shapes=outputs,
        shard_elements=size,
        **_attributes(codec),
    )
    return list(result) if shapes else []


def decode_sum(payloads: tf.Tensor, codec: Codec, elements: int, *, factor: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Decodes the payloads of several peers for the same elements, and sums them in the order of the peers.

    Args:
      payloads: int32 [peers, words]; at most 64 peers on a GPU.
      codec: The codec that made them.
      elements: Elements of each payload.
      factor: Multiplies the sum; float32 scalar.

    Returns:
      float32 [elements].

    Raises:
      TypeError: The payloads are not int32.
      ValueError: A payload does not have the length that follows from codec and elements.
      tf.errors.InvalidArgumentError: As for `decode`.
    """
    operations = library().operations
    if operations is None:
        return reference.decode_sum(payloads, codec, elements, factor=factor)
    arguments.check_codec(codec)
    elements = arguments.whole_number("elements", elements)
    payloads = arguments.payload_tensor(payloads)
    arguments.check_payloads(codec, payloads, elements)
    return operations.tfpar_decode_sum(
        payloads=payloads,
        factor=arguments.scalar_factor(factor),
        elements=elements,
        **_attributes(codec),
    )


def recode(
    payloads: tf.Tensor,
    residual: tf.Tensor | None,
    codec: Codec,
    elements: int,
    *,
    factor: tf.Tensor | float = 1.0,
    begin: int | tf.Tensor = 0,
    valid: int | None = None,
    seed_step: tf.Tensor | None = None,
    measures_norms: tf.Tensor | bool = True,
) -> Encoded:
    """Decodes and sums payloads, multiplies, adds the owner's residual and encodes again, in one pass.

    Args:
      payloads: int32 [peers, words]; at most 64 peers on a GPU.
      residual: float32 [valid], of the owner of this shard; None for no error feedback.
      codec: The codec, for reading and for writing.
      elements: Elements of each payload.
      factor: Multiplies the sum, 1 / peers for the mean; float32 scalar.
      begin: Position of the first element in the whole vector, from which stochastic rounding counts; a multiple of the
        block size. Integer or integer scalar tensor.
      valid: Elements that exist; [valid, elements) is padding. By default all.
      seed_step: int64 [2], seed and step of stochastic rounding; None for nearest.
      measures_norms: Bool scalar; if false, the norms are NaN, and take no time on CPUs, otherwise up to half of it.

    Returns:
      Payload int32 [1, words], new residual float32 [valid] (None without one), and the squared L2 norms of the scaled
      sum and of the new residual, float32 [2].

    Raises:
      TypeError: A tensor has another dtype.
      ValueError: A length or shape does not fit, or `seed_step` does not go with the codec's rounding.
      tf.errors.InvalidArgumentError: As for `decode`.
    """
    operations = library().operations
    if operations is None:
        return reference.recode(
            payloads,
            residual,
            codec,
            elements,
            factor=factor,
            begin=begin,
            valid=valid,
            seed_step=seed_step,
            measures_norms=measures_norms,
        )
    inputs = _recoding(payloads, codec, elements, factor, begin, valid, seed_step, measures_norms)
    residual = arguments.residual_tensor(residual, inputs["valid"])
    payload, new_residual, norms = operations.tfpar_recode(
        residual=tf.zeros([0]) if residual is None else residual, **inputs
    )
    return Encoded(payload, None if residual is None else new_residual, norms)


def recode_into(
    residual: tf.Variable,
    payloads: tf.Tensor,
    codec: Codec,
    elements: int,
    *,
    factor: tf.Tensor | float = 1.0,
    begin: int | tf.Tensor = 0,
    valid: int | None = None,
    seed_step: tf.Tensor | None = None,
    measures_norms: tf.Tensor | bool = True,
) -> Encoded:
    """As `recode`, with the residual in a variable that is updated in place: no second buffer, no copy.

    Args:
      residual: float32 variable [valid]; see `encode_into`. It stays as it was where a payload is invalid (on a GPU:
        the blocks that become NaN stay).
      payloads: As for `recode`, and so are the others.
      codec: The codec, for reading and for writing.
      elements: Elements of each payload.
      factor: Multiplies the sum.
      begin: Position of the first element in the whole vector.
      valid: Elements that exist.
      seed_step: int64 [2], seed and step of stochastic rounding; None for nearest.
      measures_norms: Bool scalar; if false, the norms are NaN, and take no time on CPUs, otherwise up to half of it.

    Returns:
      Payload and squared norms as from `recode`; `residual` is None, the variable has it.

    Raises:
      TypeError: As for `recode`; or `residual` is not a tf.Variable of float32.
      ValueError: As for `recode`.
      tf.errors.InvalidArgumentError: As for `decode`.
    """
    operations = library().operations
    if operations is None:
        return reference.recode_into(
            residual,
            payloads,
            codec,
            elements,
            factor=factor,
            begin=begin,
            valid=valid,
            seed_step=seed_step,
            measures_norms=measures_norms,
        )
    inputs = _recoding(payloads, codec, elements, factor, begin, valid, seed_step, measures_norms)
    residual = arguments.residual_variable(residual, inputs["valid"], "recode")
    payload, norms = operations.tfpar_recode_resource(residual=residual.handle, **inputs)
    return Encoded(payload, None, norms)


def norm_squared(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Squared L2 norm of tensors, seen as one vector, and whether all of it is finite.

    Summed in double precision, in an order that does not depend on the number of threads; the reference sums in
    float32, and may differ in the last digits.

    Args:
      tensors: float32 tensors of any static shapes.

    Returns:
      float32 scalar (infinite where finite elements have too large a norm); bool scalar.

    Raises:
      TypeError: A tensor has another dtype.
      ValueError: A shape is not static.
    """
    operations = library().operations
    if operations is None:
        return reference.norm_squared(tensors)
    norm, finite = operations.tfpar_norm_squared(tensors=arguments.float_tensors(tensors) or [tf.zeros([0])])
    return norm, finite


def _attributes(codec: Codec) -> dict[str, Any]:
    return {
        "kind": codec.kind,
        "block": codec.block,
        "keep": codec.keep,
        "scale": codec.scale,
        "rounding": codec.rounding,
    }


def _seed_step(codec: Codec, seed_step: tf.Tensor | None) -> tf.Tensor:
    checked = arguments.check_seed_step(codec, seed_step)
    return tf.zeros([2], tf.int64) if checked is None else checked


def _encoding(
    tensors: Sequence[tf.Tensor], codec: Codec, shards: int, shard_elements: int | None
) -> tuple[list[tf.Tensor], dict[str, Any]]:
    """Tensors, at least one, and attributes of an operation that encodes them."""
    arguments.check_codec(codec)
    tensors = arguments.float_tensors(tensors)
    size = arguments.shard_size(codec, arguments.elements_of(tensors), shards, shard_elements)
    # An attribute of 0 stands for the default, which gives shards of no elements where there are none.
    return tensors or [tf.zeros([0])], {**_attributes(codec), "shards": int(shards), "shard_elements": size}


def _recoding(
    payloads: tf.Tensor,
    codec: Codec,
    elements: int,
    factor: tf.Tensor | float,
    begin: int | tf.Tensor,
    valid: int | None,
    seed_step: tf.Tensor | None,
    measures_norms: tf.Tensor | bool,
) -> dict[str, Any]:
    """Inputs and attributes, but for the residual, of an operation that encodes again."""
    arguments.check_codec(codec)
    elements = arguments.whole_number("elements", elements)
    begin, valid = arguments.check_range(codec, elements, begin, valid)
    payloads = arguments.payload_tensor(payloads)
    arguments.check_payloads(codec, payloads, elements)
    return {
        "payloads": payloads,
        "factor": arguments.scalar_factor(factor),
        "begin": begin,
        "seed_step": _seed_step(codec, seed_step),
        "elements": elements,
        "valid": valid,
        "measures_norms": arguments.bool_scalar("measures_norms", measures_norms),
        **_attributes(codec),
    }

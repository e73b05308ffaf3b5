"""The gradient codecs in plain TensorFlow operations.

They are what the native operations are tested against, what takes their place where the library is not built, and what
XLA compiles (`tf.function(jit_compile=True)`, TPU). Results have the bits that FORMAT.md prescribes, eagerly, in a
graph and compiled by XLA alike. Shapes are static. Nothing here is differentiable.

A payload that is truncated, or that is not of the codec and length asked for, raises. Under XLA, which drops
assertions, what depends on its content cannot raise: there, a foreign header or an invalid position makes the whole
result NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfpar_ops import arguments
from tfpar_ops.codecs import Codec
from tfpar_ops.reference import bits, blocks, payload, philox

import tensorflow as tf

__all__ = ["Encoded", "decode", "decode_sum", "encode", "encode_into", "norm_squared", "recode", "recode_into"]

# Sums of squares are made of sums of this many: one running sum of a large vector would stop growing in float32.
_SUM_BLOCK = 1024


class Encoded(NamedTuple):
    """What encoding gives.

    Attributes:
      payload: int32 [shards, words], a payload a shard.
      residual: float32 [elements], what the payloads leave out; None if no residual was given.
      norms: float32 [2], squared L2 norms of the input and of the new residual (0 without one); NaN if not measured.
    """

    payload: tf.Tensor
    residual: tf.Tensor | None
    norms: tf.Tensor


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

    Args:
      tensors: float32 tensors of any static shapes; flattened and laid end to end they are one vector of L elements.
      residual: float32 [L], what earlier payloads left out; None for no error feedback.
      codec: The codec.
      shards: Number of payloads. Shard s holds elements [s S, (s + 1) S); what lies past L is padding.
      shard_elements: S, a multiple of the block size if there are several shards; by default L for one shard, else
        L / shards rounded up to whole blocks.
      seed_step: int64 [2], seed and step of stochastic rounding; None for nearest.
      measures_norms: Bool scalar; if false, the norms are NaN.

    Returns:
      Payloads [shards, payload_bytes(S) / 4], new residual [L], squared norms of tensors and new residual.

    Raises:
      TypeError: A tensor has another dtype, or is none: None, tf.IndexedSlices; `codec` is no Codec.
      ValueError: A shape is not static or does not fit, the shards do not hold the vector, or `seed_step` does not go
        with the codec's rounding.
    """
    x, size = _encoding(tensors, codec, shards, shard_elements)
    residual = arguments.residual_tensor(residual, x.shape[0])
    encoded = _encode(x, residual, codec, int(shards), size, tf.constant(0, tf.int64), seed_step)
    return _with_norms(encoded, measures_norms)


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
    """As `encode`, with the residual in a variable, which gets the new one.

    Args:
      residual: float32 variable [L].
      tensors: As for `encode`, and so are the others.
      codec: The codec.
      shards: Number of payloads.
      shard_elements: Elements of a shard.
      seed_step: int64 [2], seed and step of stochastic rounding; None for nearest.
      measures_norms: Bool scalar; if false, the norms are NaN.

    Returns:
      Payloads and squared norms as from `encode`; `residual` is None, the variable has it.

    Raises:
      TypeError: As for `encode`; or `residual` is not a tf.Variable of float32.
      ValueError: As for `encode`.
    """
    x, size = _encoding(tensors, codec, shards, shard_elements)
    residual = arguments.residual_variable(residual, x.shape[0], "encode")
    result = _encode(x, residual.read_value(), codec, int(shards), size, tf.constant(0, tf.int64), seed_step)
    residual.assign(result.residual, read_value=False)
    return _with_norms(result._replace(residual=None), measures_norms)


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
      tf.errors.InvalidArgumentError: A payload is of another codec or length, or invalid.
    """
    arguments.check_codec(codec)
    payloads = arguments.payload_tensor(payloads)
    sizes = [shape.num_elements() for shape in arguments.static_shapes(shapes)]
    size = arguments.shard_size(codec, sum(sizes), arguments.payload_rows(payloads), shard_elements)
    values, valid = _decode(payloads, codec, size)
    # Without several shards the last block may be padded; with several, each is made of whole blocks.
    vector = _scaled(tf.reshape(values, [-1])[: sum(sizes)], factor)
    parts = tf.split(_poisoned(vector, valid), sizes) if sizes else []
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def decode_sum(payloads: tf.Tensor, codec: Codec, elements: int, *, factor: tf.Tensor | float = 1.0) -> tf.Tensor:
    """Decodes the payloads of several peers for the same elements, and sums them in the order of the peers.

    Args:
      payloads: int32 [peers, words].
      codec: The codec that made them.
      elements: Elements of each payload.
      factor: Multiplies the sum; float32 scalar.

    Returns:
      float32 [elements].

    Raises:
      TypeError: The payloads are not int32.
      ValueError: A payload does not have the length that follows from codec and elements.
      tf.errors.InvalidArgumentError: A payload is of another codec or length, or invalid.
    """
    arguments.check_codec(codec)
    elements = arguments.whole_number("elements", elements)
    values, valid = _decode(arguments.payload_tensor(payloads), codec, elements)
    return _poisoned(_scaled(_summed(values), factor)[:elements], valid)


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
    """Decodes and sums payloads, multiplies, adds the owner's residual and encodes again.

    Args:
      payloads: int32 [peers, words].
      residual: float32 [valid], of the owner of this shard; None for no error feedback.
      codec: The codec, for reading and for writing.
      elements: Elements of each payload.
      factor: Multiplies the sum, 1 / peers for the mean; float32 scalar.
      begin: Position of the first element in the whole vector, from which stochastic rounding counts; a multiple of the
        block size. Integer or integer scalar tensor.
      valid: Elements that exist; [valid, elements) is padding. By default all.
      seed_step: int64 [2], seed and step of stochastic rounding; None for nearest.
      measures_norms: Bool scalar; if false, the norms are NaN.

    Returns:
      Payload [1, words], new residual [valid], squared norms of the scaled sum and of the new residual.

    Raises:
      TypeError: A tensor has another dtype.
      ValueError: A length or shape does not fit, or `seed_step` does not go with the codec's rounding.
      tf.errors.InvalidArgumentError: A payload is of another codec or length, or invalid.
    """
    shard = _recoding(payloads, codec, elements, begin, valid)
    encoded = _recode(shard, arguments.residual_tensor(residual, shard.valid), codec, factor, seed_step)
    return _with_norms(encoded, measures_norms)


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
    """As `recode`, with the residual in a variable, which gets the new one.

    Args:
      residual: float32 variable [valid].
      payloads: As for `recode`, and so are the others.
      codec: The codec, for reading and for writing.
      elements: Elements of each payload.
      factor: Multiplies the sum.
      begin: Position of the first element in the whole vector.
      valid: Elements that exist.
      seed_step: int64 [2], seed and step of stochastic rounding; None for nearest.
      measures_norms: Bool scalar; if false, the norms are NaN.

    Returns:
      Payload and squared norms as from `recode`; `residual` is None, the variable has it.

    Raises:
      TypeError: As for `recode`; or `residual` is not a tf.Variable of float32.
      ValueError: As for `recode`.
      tf.errors.InvalidArgumentError: A payload is of another codec or length, or invalid.
    """
    shard = _recoding(payloads, codec, elements, begin, valid)
    residual = arguments.residual_variable(residual, shard.valid, "recode")
    result = _recode(shard, residual.read_value(), codec, factor, seed_step)
    residual.assign(result.residual, read_value=False)
    return _with_norms(result._replace(residual=None), measures_norms)


def norm_squared(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Squared L2 norm of tensors, seen as one vector, and whether all of it is finite.

    Args:
      tensors: float32 tensors of any static shapes.

    Returns:
      float32 scalar (infinite also where finite elements are too large to be squared); bool scalar.

    Raises:
      TypeError: A tensor has another dtype.
      ValueError: A shape is not static.
    """
    tensors = arguments.float_tensors(tensors)
    flat = [tf.stop_gradient(tf.reshape(tensor, [-1])) for tensor in tensors]
    finite = [tf.reduce_all(bits.magnitude(bits.of(vector)) < bits.INFINITY) for vector in flat]
    return tf.add_n([_sum_squares(vector) for vector in flat] or [tf.zeros([])]), tf.reduce_all([True, *finite])


class _Shard(NamedTuple):
    """What is decoded and encoded again, its arguments checked as far as they are known."""

    payloads: tf.Tensor
    elements: int
    begin: tf.Tensor
    valid: int


def _encoding(
    tensors: Sequence[tf.Tensor], codec: Codec, shards: int, shard_elements: int | None
) -> tuple[tf.Tensor, int]:
    """The vector to be encoded, float32 [L], and how many elements a shard has; arguments checked."""
    arguments.check_codec(codec)
    tensors = arguments.float_tensors(tensors)
    size = arguments.shard_size(codec, arguments.elements_of(tensors), shards, shard_elements)
    flat = [tf.stop_gradient(tf.reshape(tensor, [-1])) for tensor in tensors]
    return tf.concat(flat, axis=0) if flat else tf.zeros([0]), size


def _recoding(payloads: tf.Tensor, codec: Codec, elements: int, begin: int | tf.Tensor, valid: int | None) -> _Shard:
    arguments.check_codec(codec)
    elements = arguments.whole_number("elements", elements)
    begin, valid = arguments.check_range(codec, elements, begin, valid)
    payloads = arguments.payload_tensor(payloads)
    arguments.check_payloads(codec, payloads, elements)
    return _Shard(payloads, elements, begin, valid)


def _recode(
    shard: _Shard, residual: tf.Tensor | None, codec: Codec, factor: tf.Tensor | float, seed_step: tf.Tensor | None
) -> Encoded:
    values, intact = _decode(shard.payloads, codec, shard.elements)
    intact &= _check_begin(codec, shard.begin)
    x = _poisoned(_scaled(_summed(values), factor)[: shard.valid], intact)
    return _encode(x, residual, codec, 1, shard.elements, shard.begin // codec.block, seed_step)


def _encode(
    x: tf.Tensor,
    residual: tf.Tensor | None,
    codec: Codec,
    shards: int,
    size: int,
    first_block: tf.Tensor,
    seed_step: tf.Tensor | None,
) -> Encoded:
    """Encodes a vector as shards of `size` elements, the first of which starts at `first_block` of the whole vector."""
    elements = x.shape[0]
    count = shards * codec.blocks(size)
    v = bits.flush(x) if residual is None else bits.flush(bits.add(x, tf.stop_gradient(residual)))
    v = tf.reshape(tf.pad(v, [[0, count * codec.block - elements]]), [count, codec.block])
    seed_step = arguments.check_seed_step(codec, seed_step)
    offsets = None if seed_step is None else philox.rounding_offsets(seed_step, first_block, count, codec.block)
    stored = blocks.encode(codec, v, elements, offsets)
    norms = [_sum_squares(x), tf.zeros([])]
    new_residual = None
    if residual is not None:
        decoded = blocks.decode(codec, stored)
        lost = tf.reshape(v - decoded, [-1])[:elements]
        # Not finite: decodes to NaN, leaves the residual alone. Chosen as bits, which also keeps those of a NaN in it.
        kept = bits.magnitude(bits.of(lost)) > bits.INFINITY
        new_residual = bits.as_float(tf.where(kept, bits.of(residual), bits.of(bits.flush(lost))))
        norms[1] = _sum_squares(new_residual)
    return Encoded(payload.assemble(codec, stored, shards, size), new_residual, tf.stack(norms))


def _with_norms(encoded: Encoded, measures_norms: tf.Tensor | bool) -> Encoded:
    """The same, with NaN for norms that are not to be measured."""
    wanted = arguments.bool_scalar("measures_norms", measures_norms)
    return encoded._replace(norms=tf.where(wanted, encoded.norms, float("nan")))


def _decode(payloads: tf.Tensor, codec: Codec, elements: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Values of payloads, float32 [payloads, blocks * B], and whether they were valid (bool scalar)."""
    arguments.check_payloads(codec, payloads, elements)
    valid = payload.check_header(codec, payloads, elements)
    stored = payload.take_apart(codec, payloads, elements)
    values = blocks.decode(codec, stored)
    valid &= payload.check_positions(codec, stored, payloads.shape[0])
    return tf.reshape(values, [payloads.shape[0], codec.blocks(elements) * codec.block]), valid


def _check_begin(codec: Codec, begin: tf.Tensor) -> tf.Tensor:
    """Checks the position of a shard where it is a tensor; bool scalar, true where assertions run."""
    valid = (begin >= 0) & (begin % codec.block == 0)
    payload.require(valid, ["begin=", begin, f" is not a multiple of the block, {codec.block}"])
    return valid


def _summed(values: tf.Tensor) -> tf.Tensor:
    """Sum over peers, float32 [peers, n] to [n], one peer after the other."""
    total = values[0]
    for peer in range(1, values.shape[0]):
        total = bits.add(total, values[peer])
    return total


def _scaled(total: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
    """`scaled(total)` of FORMAT.md: the product, without the smallest; as it is where the factor is 1."""
    if isinstance(factor, (int, float)) and factor == 1:
        return total
    factor = tf.stop_gradient(arguments.scalar_factor(factor))
    product = bits.of(bits.zero_denormals(total) * bits.zero_denormals(factor))
    product = tf.where(bits.magnitude(product) <= bits.SMALLEST_NORMAL, 0, product)
    return bits.as_float(tf.where(factor == 1, bits.of(total), product))


def _poisoned(values: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """The values, or NaN throughout: what is left to say under XLA, where assertions are dropped."""
    return bits.as_float(tf.where(valid, bits.of(values), bits.NAN))


def _sum_squares(vector: tf.Tensor) -> tf.Tensor:
    padded = tf.pad(vector, [[0, -vector.shape[0] % _SUM_BLOCK]])
    return tf.reduce_sum(tf.reduce_sum(tf.square(tf.reshape(padded, [-1, _SUM_BLOCK])), axis=1))

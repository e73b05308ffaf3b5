"""Checks of arguments, shared by all implementations.

A wrong type or dtype is a TypeError, a wrong value or shape a ValueError; what is known only when an operation runs, in
a function, a tf.errors.InvalidArgumentError. Messages say argument, value, what is allowed and what to do.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from tfpar_ops.codecs import Codec

import numpy as np
import tensorflow as tf

_LARGEST_BYTES = 2**63 - 1


def check_codec(codec: Codec) -> None:
    """Checks that an argument is a `Codec`.

    Raises:
      TypeError: It is not.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f"codec: {codec!r} is {_kind_of(codec)}; expected a tfpar_ops.Codec, as in Codec('int4')")


def float_tensors(tensors: Sequence[Any]) -> list[tf.Tensor]:
    """What is to be encoded, as tensors.

    Args:
      tensors: Float32 tensors, variables, NumPy arrays, or (nested lists of) Python floats.

    Raises:
      TypeError: Not a list, or one of them is not float32, or no dense tensor.
      ValueError: A shape is not static.
    """
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(
            f"tensors: {_kind_of(tensors)}; expected a list of float32 tensors, also for a single one: [tensor]"
        )
    found = []
    for index, value in enumerate(tensors):
        tensor = _tensor(f"tensors[{index}]", value, tf.float32)
        if not tensor.shape.is_fully_defined():
            raise ValueError(
                f"tensors[{index}]: shape {tensor.shape} is not static, the payload length follows from it; set it "
                "with tf.ensure_shape"
            )
        found.append(tensor)
    return found


def elements_of(tensors: Sequence[tf.Tensor]) -> int:
    """Elements of tensors of static shapes together."""
    return sum(tensor.shape.num_elements() for tensor in tensors)


def static_shapes(shapes: Sequence[Any]) -> list[tf.TensorShape]:
    """Shapes of the tensors that a vector is cut into.

    Raises:
      TypeError: Not a list of shapes.
      ValueError: A shape is not static.
    """
    if not isinstance(shapes, (list, tuple)):
        raise TypeError(f"shapes: {_kind_of(shapes)}; expected a list of shapes, as in [[3, 4], [5]]")
    found = []
    for index, value in enumerate(shapes):
        if isinstance(value, numbers.Integral):
            raise TypeError(f"shapes[{index}]: {value!r} is no shape; expected a list of shapes, as in [[3, 4], [5]]")
        try:
            shape = tf.TensorShape(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"shapes[{index}]: {value!r} is no shape ({error})") from error
        if not shape.is_fully_defined():
            raise ValueError(
                f"shapes[{index}]: {shape} is not static; expected known dims, as the payload length follows from them"
            )
        found.append(shape)
    return found


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """A number of Python's, NumPy's, or any other kind of integer.

    Raises:
      TypeError: Not an integer; a tensor, for one, is not known before the operation runs.
      ValueError: Less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} is {_kind_of(value)}; expected a whole number")
    if value < least:
        raise ValueError(f"{name}={value}; expected at least {least}")
    return int(value)


def shard_size(codec: Codec, elements: int, shards: int, shard_elements: int | None) -> int:
    """Elements of a shard: the given number, checked; by default all for one shard, else the fewest whole blocks.

    Raises:
      TypeError: A number is not whole.
      ValueError: Fewer than one shard, a shard that does not end with a block, shards that do not hold all elements, or
        payloads of more than 2^63 - 1 bytes.
    """
    shards = whole_number("shards", shards, least=1)
    if shard_elements is None:
        size = elements if shards == 1 else codec.blocks(-(-elements // shards)) * codec.block
    else:
        size = whole_number("shard_elements", shard_elements)
        if shards > 1 and size % codec.block:
            raise ValueError(f"shard_elements={size} is not a multiple of the block size, {codec.block}")
        if shards * size < elements:
            raise ValueError(
                f"shards={shards} of shard_elements={size} do not hold {elements} elements; at least "
                f"{-(-elements // shards)} each are needed, None takes the fewest"
            )
    if shards * codec.payload_bytes(size) > _LARGEST_BYTES:
        raise ValueError(f"shards={shards} of shard_elements={size}: their payloads have more than 2^63 bytes")
    return size


def residual_tensor(residual: Any, elements: int) -> tf.Tensor | None:
    """A residual that is given as a value, None if there is none.

    Raises:
      TypeError: Not float32, or no dense tensor.
      ValueError: It has not as many elements as are encoded.
    """
    if residual is None:
        return None
    tensor = _tensor("residual", residual, tf.float32)
    _check_residual_shape(tensor.shape, elements)
    return tensor


def residual_variable(residual: Any, elements: int, otherwise: str) -> tf.Variable:
    """A residual that is updated in place.

    Args:
      residual: What was given.
      elements: How many are encoded.
      otherwise: The function that takes and gives values.

    Raises:
      TypeError: Not a tf.Variable, or not float32.
      ValueError: It has not as many elements as are encoded.
    """
    if not isinstance(residual, tf.Variable):
        hint = f"tfpar_ops.{otherwise} takes a tensor, or None for no error feedback"
        if isinstance(getattr(residual, "value", None), tf.Variable):
            hint = "give the .value of a Keras variable"
        raise TypeError(f"residual: {_kind_of(residual)}; expected a tf.Variable, float32 [{elements}]; {hint}")
    if residual.dtype != tf.float32:
        raise TypeError(f"residual: dtype {residual.dtype.name}; expected float32")
    _check_residual_shape(residual.shape, elements)
    return residual


def check_seed_step(codec: Codec, seed_step: Any) -> tf.Tensor | None:
    """Seed and step of stochastic rounding as int64 [2], None for nearest.

    Raises:
      TypeError: Not int64.
      ValueError: Missing for a codec that rounds stochastically, given for one that does not, or of another shape.
    """
    if codec.rounding == "nearest":
        if seed_step is not None:
            raise ValueError("seed_step: given, but the codec rounds to nearest; leave it out")
        return None
    if seed_step is None:
        raise ValueError("seed_step: missing, the codec rounds stochastically; expected int64 [2], seed and step")
    return _of_shape("seed_step", _tensor("seed_step", seed_step, tf.int64), [2], "seed and step")


def scalar_factor(factor: Any) -> tf.Tensor:
    """What sums are multiplied by, as a float32 scalar.

    Raises:
      TypeError: Not float32; Python's and NumPy's numbers become it.
      ValueError: Not a scalar.
    """
    if isinstance(factor, np.ndarray) and factor.ndim == 0:
        factor = factor.item()
    if isinstance(factor, numbers.Real) and not isinstance(factor, bool):
        return tf.constant(float(factor), tf.float32)
    return _of_shape("factor", _tensor("factor", factor, tf.float32), [], "a scalar")


def bool_scalar(name: str, value: Any) -> tf.Tensor:
    """A choice, as a bool scalar.

    Args:
      name: Name of the argument.
      value: A bool of Python or NumPy, or a tensor.

    Raises:
      TypeError: Not bool.
      ValueError: Not a scalar.
    """
    if isinstance(value, (bool, np.bool_)):
        return tf.constant(bool(value))
    return _of_shape(name, _tensor(name, value, tf.bool), [], "a scalar")


def check_range(codec: Codec, elements: int, begin: Any, valid: Any) -> tuple[tf.Tensor, int]:
    """Which elements of the whole vector are encoded again.

    Returns:
      Begin, int64 scalar, checked as far as it is known now; and the number of valid elements.

    Raises:
      TypeError: A number is not whole.
      ValueError: `begin` is not the first element of a block, or there are more valid elements than elements.
    """
    valid = elements if valid is None else whole_number("valid", valid)
    if valid > elements:
        raise ValueError(f"valid={valid} is not between 0 and elements={elements}")
    if isinstance(begin, np.ndarray) and begin.ndim == 0:
        begin = begin.item()
    if not tf.is_tensor(begin) and not isinstance(begin, tf.Variable):
        begin = whole_number("begin", begin)
        if begin % codec.block:
            raise ValueError(f"begin={begin} is not a multiple of the block size, {codec.block}")
        return tf.constant(begin, tf.int64), valid
    if not begin.dtype.is_integer:
        raise TypeError(f"begin: dtype {begin.dtype.name}; expected an integer")
    return _of_shape("begin", tf.cast(begin, tf.int64), [], "a scalar"), valid


def check_payloads(codec: Codec, payloads: tf.Tensor, elements: int) -> None:
    """Checks what is known of payloads before their content is: rank and length.

    Raises:
      ValueError: Not a matrix of at least one payload, or not of the length that these elements have.
    """
    words = codec.payload_bytes(elements) // 4
    shape = payloads.shape
    expected = f"[peers >= 1, {words}], {words} words being the payload of {elements} elements of {codec}"
    if not shape.is_fully_defined():
        raise ValueError(f"payloads: shape {shape} is not static; set it with tf.ensure_shape to {expected}")
    if shape.rank != 2 or shape[0] < 1 or shape[1] != words:
        raise ValueError(f"payloads: shape {shape}; expected {expected}")


def payload_tensor(payloads: Any) -> tf.Tensor:
    """Payloads as a tensor, int32.

    Raises:
      TypeError: Not int32.
    """
    return _tensor("payloads", payloads, tf.int32)


def payload_rows(payloads: tf.Tensor) -> int:
    """How many payloads there are.

    Raises:
      ValueError: Not a matrix, or the number is not static.
    """
    shape = payloads.shape
    if shape.rank is None or (shape.rank == 2 and shape[0] is None):
        raise ValueError(f"payloads: shape {shape} is not static; set it with tf.ensure_shape to [shards, words]")
    if shape.rank != 2 or not shape[0]:
        raise ValueError(f"payloads: shape {shape}; expected [shards >= 1, words]")
    return shape[0]


def _tensor(name: str, value: Any, dtype: tf.DType) -> tf.Tensor:
    """A dense tensor of this dtype; NumPy arrays keep theirs, Python numbers take it."""
    if isinstance(value, tf.IndexedSlices):
        raise TypeError(
            f"{name}: tf.IndexedSlices; expected a dense {dtype.name} tensor, which tf.convert_to_tensor makes of it"
        )
    try:
        plain = isinstance(value, (list, tuple, numbers.Number)) and not hasattr(value, "dtype")
        tensor = tf.convert_to_tensor(value, dtype) if plain else tf.convert_to_tensor(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name}: {_kind_of(value)}; expected a {dtype.name} tensor ({error})") from error
    if tensor.dtype != dtype:
        found = tensor.dtype
        alike = found.is_floating if dtype.is_floating else found.is_integer and dtype == tf.int64
        hint = ", tf.cast makes it so" if alike else ""
        raise TypeError(f"{name}: dtype {found.name}; expected {dtype.name}{hint}")
    return tensor


def _of_shape(name: str, tensor: tf.Tensor, shape: list[int], what: str) -> tf.Tensor:
    """The tensor, whose shape must be this one; checked as it runs where it is not known before."""
    if not tensor.shape.is_compatible_with(shape):
        raise ValueError(f"{name}: shape {tensor.shape}; expected {shape}, {what}")
    return tensor if tensor.shape.is_fully_defined() else tf.ensure_shape(tensor, shape)


def _check_residual_shape(shape: tf.TensorShape, elements: int) -> None:
    if shape.rank != 1 or shape[0] != elements:
        raise ValueError(f"residual: shape {shape}; expected [{elements}], as many elements as are encoded")


def _kind_of(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"

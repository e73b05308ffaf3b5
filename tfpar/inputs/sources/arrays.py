"""Examples in the arrays of a program."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from tfpar.config import ConfigError, unknown_name
from tfpar.inputs import structures
from tfpar.inputs.memory import check_values, gather_packed
from tfpar.inputs.source import CLASSIFICATION, Batch, LazyTensors, Source, SourceInfo, Weighted
from tfpar.inputs.structures import Structure

import keras
import numpy as np
import tensorflow as tf

_INT32 = np.iinfo(np.int32)
_INT64 = np.iinfo(np.int64)


def from_arrays(
    x: Structure,
    y: Structure | None = None,
    *,
    sample_weight: Structure | None = None,
    num_classes: int | None = None,
    ignore_class: int | None = None,
    scale: Structure = 1.0,
    split: str = "train",
    name: str = "arrays",
    on_bad_record: str = "fail",
) -> Source:
    """Returns a source over arrays in memory.

    Args:
      x: Inputs `[n, ...]`, or a tuple, list or dict of them for a model with several inputs. As in Keras, a list of
        arrays is several inputs; a list of numbers is one array. The model receives floating-point inputs as
        `keras.config.floatx()`, integers as int32 (int64 where int32 cannot hold them), text as `tf.string`. uint8
        arrays of three dims or more are images: the model receives them as floats, not scaled, as from Keras' `fit`.
      y: Labels: integers `[n, ...]`, in `[0, num_classes)`, or floating-point targets `[n, ...]`; or a tuple, list or
        dict of them. None: the model trains without labels.
      sample_weight: Weights `[n]`, or `[n, ...]` per position, or a structure of them like `y`, with the meaning
        that they have in Keras' `fit`.
      num_classes: Number of classes; by default the largest label plus one, or for targets their last dim. 0 leaves
        integer labels unchecked. Not for several labels, which are not checked.
      ignore_class: A label outside `[0, num_classes)` that the loss ignores, such as -1.
      scale: Factor for the floating-point inputs, e.g. 1/255 for images; or a structure like `x` with one for each.
      split: `"train"` or `"validation"`, for reports.
      name: For reports and errors.
      on_bad_record: What to do with labels out of range and values that are NaN or infinite: `"fail"`, or `"skip"` to
        train without such examples and count them.

    Returns:
      A source of the `n` examples in the order of the arrays, which are copied once.

    Raises:
      ConfigError: The arrays have different lengths or are neither numbers nor text, int32 cannot hold a label, or an
        example is bad.
    """
    if on_bad_record not in ("fail", "skip"):
        raise unknown_name("on_bad_record", on_bad_record, ("fail", "skip"))
    if sample_weight is not None and y is None:
        raise ConfigError(f"{name}: sample_weight needs labels, and y is None. Give y, or leave out sample_weight.")
    x_arrays = _as_arrays(name, "inputs", x)
    y_arrays = () if y is None else _as_arrays(name, "labels", y)
    weight_arrays = () if sample_weight is None else _as_arrays(name, "weights", sample_weight)
    count = _check_lengths(name, {"inputs": x_arrays, "labels": y_arrays, "weights": weight_arrays})
    scale = structures.without_lists(scale)
    _check_scale(name, x_arrays, scale)
    stored_x = tf.nest.map_structure(lambda values: _as_stored(name, "inputs", values), x_arrays)
    stored_y = tf.nest.map_structure(lambda values: _as_stored(name, "labels", values), y_arrays)
    weights = tf.nest.map_structure(lambda values: _as_weights(name, values), weight_arrays)
    targets = stored_y if sample_weight is None else Weighted(stored_y, weights)
    flat = tf.nest.flatten((stored_x, targets))
    single = structures.is_single(stored_y)
    info = SourceInfo(
        name=name,
        task=CLASSIFICATION,
        split=split,
        num_examples=count,
        input_spec=tf.nest.map_structure(_input_spec, stored_x),
        label_spec=tf.nest.map_structure(_spec, stored_y),
        num_classes=(_count_classes(stored_y, ignore_class) if single else 0) if num_classes is None else num_classes,
        weight_spec=tf.nest.map_structure(_spec, weights),
        ignore_class=ignore_class,
        label_range=_range(stored_y, ignore_class) if single else None,
        storage="memory",
        digest=_digest(*flat),
    )

    def read(indices: tf.Tensor) -> Batch:
        return gather_packed(info, arrays.tensors(), indices)

    def usable(indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(arrays.tensors()[-1], indices)

    size = sum(_bytes(values) for values in flat)
    source = Source(info=info, read=read, scale=scale, kept_bytes=size, skip=on_bad_record == "skip")
    mask = check_values(source, stored_x, targets)
    arrays = LazyTensors(lambda: (*flat, mask))
    return dataclasses.replace(source, load=arrays.tensors, usable=None if mask.all() else usable)


def _as_arrays(name: str, what: str, values: Structure) -> Structure:
    """Returns a structure of NumPy arrays: a tuple or list of arrays is several, one of numbers is a single array."""
    if isinstance(values, Mapping):
        converted: Structure = {str(key): _as_arrays(name, what, value) for key, value in values.items()}
    elif isinstance(values, (tuple, list)) and any(
        isinstance(value, Mapping) or getattr(value, "ndim", 0) for value in values
    ):
        converted = tuple(_as_arrays(name, what, value) for value in values)
    else:
        return _as_array(name, what, values)
    if structures.is_empty(converted):
        raise ConfigError(f"{name}: the {what} are {values!r}, without an array. Give at least one array.")
    return converted


def _as_array(name: str, what: str, values: Any) -> np.ndarray:
    """Returns one array of real numbers or text; anything else is refused."""
    array = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    text = array.dtype.kind in "SU" or (array.dtype == object and all(isinstance(v, (str, bytes)) for v in array.flat))
    if text and what == "inputs":
        return array.astype(object)
    number = np.issubdtype(array.dtype, np.number) or array.dtype == bool or array.dtype.name == "bfloat16"
    if not number or np.iscomplexobj(array):
        allowed = "real numbers or text" if what == "inputs" else "real numbers"
        raise ConfigError(
            f"{name}: the {what} have dtype {array.dtype}, but must be {allowed}. Convert them, e.g. with "
            "np.asarray(..., np.float32); convert class labels to integers."
        )
    if not array.ndim:
        raise ConfigError(f"{name}: the {what} are the single number {array}. Give an array with one row per example.")
    return array


def _check_lengths(name: str, parts: dict[str, Structure]) -> int:
    """Returns the number of examples; refuses arrays of different lengths."""
    lengths = {
        f"{what} {path!r}" if path else what: len(values)
        for what, part in parts.items()
        for path, values in structures.named_leaves(part)
    }
    if len(set(lengths.values())) > 1:
        listed = " and ".join(f"{length} {what}" for what, length in lengths.items())
        raise ConfigError(
            f"{name}: {listed}; there must be one label per input, and one row per example in every array. A list of "
            "arrays is one array per input of the model; join the arrays of single examples with np.stack."
        )
    return next(iter(lengths.values()))


def _check_scale(name: str, x: Structure, scale: Structure) -> None:
    if structures.is_single(scale):
        return
    try:
        tf.nest.assert_same_structure(x, scale)
    except (ValueError, TypeError):
        expected = [path for path, _ in structures.named_leaves(x)]
        raise ConfigError(
            f"{name}: scale={scale!r} has another structure than the inputs, {expected}. Give one number, or one for "
            "each input."
        ) from None


def _as_stored(name: str, what: str, values: np.ndarray) -> np.ndarray:
    """Copies an array in the dtype it is kept in; images stay uint8."""
    if values.dtype == object or (what == "inputs" and _is_image(values)):
        return values.copy()
    if np.issubdtype(values.dtype, np.integer):
        return values.astype(_integer_dtype(name, what, values))
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which `check_values` reports
        return values.astype(keras.config.floatx() if keras.config.floatx() == "float64" else np.float32)


def _as_weights(name: str, values: np.ndarray) -> np.ndarray:
    return _as_stored(name, "weights", values.astype(np.float64 if values.dtype == np.float64 else np.float32))


def _is_image(values: np.ndarray) -> bool:
    return values.dtype == np.uint8 and values.ndim >= 3


def _integer_dtype(name: str, what: str, values: np.ndarray) -> type[np.integer]:
    """Returns int32, or int64 for inputs that need it; refuses larger integers, and labels that int32 cannot hold."""
    if not values.size:
        return np.int32
    low, high = int(values.min()), int(values.max())
    if _INT32.min <= low and high <= _INT32.max:
        return np.int32
    if what == "inputs" and high <= _INT64.max:
        return np.int64
    held = "int32 holds -2^31 to 2^31 - 1" if what == "labels" else "int64 holds -2^63 to 2^63 - 1"
    raise ConfigError(
        f"{name}: integer {what} range from {low} to {high}, but {held}. Map them to smaller integers (ids, e.g. with "
        "keras.layers.Hashing), or convert them to floating point."
    )


def _spec(values: np.ndarray) -> tf.TensorSpec:
    dtype = tf.string if values.dtype == object else tf.as_dtype(values.dtype)
    return tf.TensorSpec(values.shape[1:], dtype)


def _input_spec(values: np.ndarray) -> tf.TensorSpec:
    if _is_image(values):
        return tf.TensorSpec(
            values.shape[1:], keras.config.floatx() if keras.config.floatx() == "float64" else tf.float32
        )
    return _spec(values)


def _count_classes(y: np.ndarray, ignore_class: int | None) -> int:
    """The largest label plus one, at least one; for targets, their last dim."""
    if np.issubdtype(y.dtype, np.integer):
        if ignore_class is not None:
            y = y[y != ignore_class]
        return max(int(y.max(initial=-1)) + 1, 1)
    return int(y.shape[-1] if y.ndim > 1 else 1)


def _range(y: np.ndarray, ignore_class: int | None) -> tuple[float, float] | None:
    values = y if ignore_class is None else y[y != ignore_class]
    return (float(values.min()), float(values.max())) if values.size else None


def _bytes(values: np.ndarray) -> int:
    """Size of an array, in bytes; of text, the length of the strings and their pointers."""
    return values.nbytes + (sum(len(text) for text in values.flat) if values.dtype == object else 0)


def _digest(*arrays: np.ndarray) -> str:
    """Hashes the content of arrays: about one second per gigabyte."""
    content = hashlib.blake2b(digest_size=16)
    for values in arrays:
        if values.dtype == object:
            for text in values.flat:
                encoded = text.encode() if isinstance(text, str) else text
                content.update(len(encoded).to_bytes(8, "little") + encoded)
        elif values.size:
            content.update(np.ascontiguousarray(values).data.cast("B"))
    return content.hexdigest()

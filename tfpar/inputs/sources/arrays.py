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
from tfpar.inputs.sources.columns import dtypes
from tfpar.inputs.structures import Structure

import numpy as np
import tensorflow as tf


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
        integer labels unchecked, and means the default for targets. Not for several labels, which are not checked.
      ignore_class: A label outside `[0, num_classes)` that the loss ignores, such as -1.
      scale: Factor for the floating-point inputs, e.g. 1/255 for images; or a structure like `x` with one for each.
      split: `"train"` or `"validation"`, for reports.
      name: Name for reports and errors.
      on_bad_record: Treatment of labels out of range and of values that are NaN or infinite: `"fail"`, or `"skip"` to
        train without such examples and count them.

    Returns:
      A source of the `n` examples in the order of the arrays, which are copied once.

    Raises:
      ConfigError: The arrays have different lengths or are neither numbers nor text, int32 cannot hold a label, or an
        example is bad.
    """
    if on_bad_record not in ("fail", "skip"):
        raise unknown_name("on_bad_record", on_bad_record, ("fail", "skip"))
    stored_x, stored_y, weights = _stored_parts(name, x, y, sample_weight)
    scale = _checked_scale(name, stored_x, scale)
    targets = stored_y if sample_weight is None else Weighted(stored_y, weights)
    flat = tf.nest.flatten((stored_x, targets))
    info = SourceInfo(
        name=name,
        task=CLASSIFICATION,
        split=split,
        num_examples=len(flat[0]),
        input_spec=tf.nest.map_structure(_spec, stored_x),
        label_spec=tf.nest.map_structure(_spec, stored_y),
        num_classes=_count_classes(stored_y, ignore_class, num_classes),
        weight_spec=tf.nest.map_structure(_spec, weights),
        ignore_class=ignore_class,
        label_range=_range(stored_y, ignore_class),
        storage="memory",
        digest=_digest(*flat),
    )
    return _source_of(info, stored_x, targets, scale, skip=on_bad_record == "skip")


def _source_of(info: SourceInfo, x: Structure, y: Structure, scale: Structure, *, skip: bool) -> Source:
    """Checks arrays as stored, and returns their source."""

    def read(indices: tf.Tensor) -> Batch:
        return gather_packed(info, arrays.tensors(), indices)

    def usable(indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(arrays.tensors()[-1], indices)

    flat = tf.nest.flatten((x, y))
    source = Source(info=info, read=read, scale=scale, kept_bytes=sum(map(_bytes, flat)), skip=skip)
    mask = check_values(source, x, y)
    if not mask.all():
        labels = y.y if isinstance(y, Weighted) else y
        usable_labels = tf.nest.map_structure(lambda values: values[mask], labels)
        info = dataclasses.replace(info, label_range=_range(usable_labels, info.ignore_class))
    arrays = LazyTensors(lambda: (*flat, mask))
    return dataclasses.replace(source, info=info, load=arrays.tensors, usable=None if mask.all() else usable)


def _stored_parts(
    name: str, x: Structure, y: Structure | None, sample_weight: Structure | None
) -> tuple[Structure, Structure, Structure]:
    """Returns copies of the inputs, labels and weights as they are kept; `()` for None."""
    if x is None:
        raise ConfigError(f"{name}: the inputs are None. Give an array with one row per example.")
    if sample_weight is not None and y is None:
        raise ConfigError(f"{name}: sample_weight needs labels, and y is None. Give y, or leave out sample_weight.")
    parts = {
        what: () if values is None else _as_arrays(name, what, values)
        for what, values in (("inputs", x), ("labels", y), ("weights", sample_weight))
    }
    _check_lengths(name, parts)
    stored_x, stored_y, weights = (
        tf.nest.map_structure(lambda values, what=what: _as_stored(name, what, values), part)
        for what, part in parts.items()
    )
    return stored_x, stored_y, weights


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
    """Returns one array; refuses a single number."""
    try:
        array = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    except ValueError as error:
        raise ConfigError(
            f"{name}: the {what} are no array ({error}). All examples need the same shape: pad or crop them."
        ) from error
    if not array.ndim:
        raise ConfigError(f"{name}: the {what} are the single value {array}. Give an array with one row per example.")
    return array


def _check_lengths(name: str, parts: dict[str, Structure]) -> None:
    """Refuses arrays of different lengths."""
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


def _checked_scale(name: str, x: Structure, scale: Structure) -> Structure:
    """Returns the factors with tuples in place of lists; refuses another structure than that of the inputs."""
    scale = structures.without_lists(scale)
    if structures.is_single(scale):
        return scale
    try:
        tf.nest.assert_same_structure(x, scale)
    except (ValueError, TypeError):
        expected = [path for path, _ in structures.named_leaves(x)]
        raise ConfigError(
            f"{name}: scale={scale!r} has another structure than the inputs, {expected}. Give one number, or one for "
            "each input."
        ) from None
    return scale


def _as_stored(name: str, what: str, values: np.ndarray) -> np.ndarray:
    """Copies an array to the dtype in which it is stored; refuses values that are neither numbers nor text."""
    try:
        return dtypes.as_stored(values, dtypes.stored_dtype(values, what, rank=values.ndim - 1))
    except ValueError as error:
        raise ConfigError(f"{name}: {_subject(what, values)} {error}") from None


def _subject(what: str, values: np.ndarray) -> str:
    """Returns the subject of an error message about an array."""
    return f"the {what}" if values.dtype.kind not in "iu" else f"integer {what}"


def _spec(values: np.ndarray) -> tf.TensorSpec:
    return tf.TensorSpec(values.shape[1:], dtypes.fetched_dtype(values.dtype))


def _count_classes(y: Structure, ignore_class: int | None, given: int | None) -> int:
    """Returns the number that is given; without it, the largest label plus one, at least one; for targets, also with 0,
    their last dim; 0 for several labels or none."""
    if given or not structures.is_single(y):
        return given or 0
    if np.issubdtype(y.dtype, np.integer):
        labels = y if ignore_class is None else y[y != ignore_class]
        return 0 if given == 0 else max(int(labels.max(initial=-1)) + 1, 1)
    return int(y.shape[-1] if y.ndim > 1 else 1)


def _range(y: Structure, ignore_class: int | None) -> tuple[float, float] | None:
    """Returns the smallest and the largest label; None for several labels or none."""
    if not structures.is_single(y):
        return None
    values = y if ignore_class is None else y[y != ignore_class]
    return (float(values.min()), float(values.max())) if values.size else None


def _bytes(values: np.ndarray) -> int:
    """Returns the size of an array in bytes; for text, that of the strings and their pointers."""
    return values.nbytes + (sum(len(text) for text in values.flat) if values.dtype == object else 0)


def _digest(*arrays: np.ndarray) -> str:
    """Hashes the content of arrays: about one second per gigabyte."""
    content = hashlib.blake2b(digest_size=16)
    for values in arrays:
        if values.dtype == object:
            for text in values.flat:
                content.update(len(text).to_bytes(8, "little") + text)
        elif values.size:
            content.update(np.ascontiguousarray(values).data.cast("B"))
    return content.hexdigest()

"""Examples in the arrays of a program."""

from __future__ import annotations

import dataclasses
import hashlib

from tfpar.config import ConfigError, unknown_name
from tfpar.inputs.memory import check_values
from tfpar.inputs.source import CLASSIFICATION, Batch, LazyTensors, Source, SourceInfo

import numpy as np
import tensorflow as tf


def from_arrays(
    x: np.ndarray,
    y: np.ndarray,
    *,
    num_classes: int | None = None,
    split: str = "train",
    name: str = "arrays",
    on_bad_record: str = "fail",
) -> Source:
    """Returns a source over arrays in memory.

    Args:
      x: Inputs `[n, ...]`. The model receives floating-point inputs as float32, integers as int32.
      y: Labels: integers `[n, ...]`, in `[0, num_classes)`, or floating-point targets `[n, ...]` as float32.
      num_classes: Number of classes; by default the largest label plus one, or for targets their last dim.
      split: `"train"` or `"validation"`, for reports.
      name: For reports and errors.
      on_bad_record: What to do with labels out of range and values that are NaN or infinite: `"fail"`, or `"skip"` to
        train without such examples and count them.

    Returns:
      A source of the `n` examples in the order of the arrays, which are copied once.

    Raises:
      ConfigError: The arrays have different lengths or are not numeric, int32 cannot hold an integer, or an example is
        bad.
    """
    if on_bad_record not in ("fail", "skip"):
        raise unknown_name("on_bad_record", on_bad_record, ("fail", "skip"))
    x, y = np.asarray(x), np.asarray(y)
    _check_arrays(name, x, y)
    stored_x, stored_y = _as_stored(x), _as_stored(y)
    info = SourceInfo(
        name=name,
        task=CLASSIFICATION,
        split=split,
        num_examples=len(x),
        input_spec=tf.TensorSpec(stored_x.shape[1:], stored_x.dtype),
        label_spec=tf.TensorSpec(stored_y.shape[1:], stored_y.dtype),
        num_classes=_count_classes(y) if num_classes is None else num_classes,
        storage="memory",
        digest=_digest(stored_x, stored_y),
    )

    def read(indices: tf.Tensor) -> Batch:
        x, y, _ = arrays.tensors()
        return tf.gather(x, indices), tf.gather(y, indices)

    def usable(indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(arrays.tensors()[2], indices)

    size = stored_x.nbytes + stored_y.nbytes
    source = Source(info=info, read=read, kept_bytes=size, skip=on_bad_record == "skip")
    mask = check_values(source, stored_x, stored_y)
    arrays = LazyTensors(lambda: (stored_x, stored_y, mask))
    return dataclasses.replace(source, load=arrays.tensors, usable=None if mask.all() else usable)


def _check_arrays(name: str, x: np.ndarray, y: np.ndarray) -> None:
    """Refuses arrays that are not numeric or of different lengths, and integers that int32 cannot hold."""
    for what, values in (("inputs", x), ("labels", y)):
        if not (np.issubdtype(values.dtype, np.number) or values.dtype == bool) or np.iscomplexobj(values):
            raise ConfigError(
                f"{name}: the {what} have dtype {values.dtype}, but must be real numbers. Convert them, e.g. with "
                "np.asarray(..., np.float32); convert class labels to integers."
            )
    if len(x) != len(y):
        raise ConfigError(f"{name}: {len(x)} inputs and {len(y)} labels; there must be one label per input.")
    for what, values in (("inputs", x), ("labels", y)):
        if np.issubdtype(values.dtype, np.integer) and values.size:
            low, high = values.min(), values.max()
            if low < -(2**31) or high >= 2**31:
                raise ConfigError(
                    f"{name}: integer {what} range from {low} to {high}, but int32 holds -2^31 to 2^31 - 1. Map them "
                    "to smaller integers (ids, e.g. with keras.layers.Hashing), or convert them to floating point."
                )


def _as_stored(values: np.ndarray) -> np.ndarray:
    """Copies integers as int32 and everything else as float32."""
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which `check_values` reports
        return values.astype(np.int32 if np.issubdtype(values.dtype, np.integer) else np.float32)


def _count_classes(y: np.ndarray) -> int:
    """The largest label plus one; for targets, their last dim."""
    if np.issubdtype(y.dtype, np.integer):
        return int(y.max(initial=-1)) + 1
    return int(y.shape[-1] if y.ndim > 1 else 1)


def _digest(*arrays: np.ndarray) -> str:
    """Hashes the content of arrays: about one second per gigabyte."""
    content = hashlib.blake2b(digest_size=16)
    for values in arrays:
        content.update(np.ascontiguousarray(values).data.cast("B") if values.size else b"")
    return content.hexdigest()

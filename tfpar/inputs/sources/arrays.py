"""Examples that a program already holds."""

from __future__ import annotations

import dataclasses
import hashlib

from tfpar.config import ConfigError, unknown_name
from tfpar.inputs.memory import check_values
from tfpar.inputs.source import CLASSIFICATION, Batch, Held, Source, SourceInfo

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
    """A source over arrays in memory.

    Args:
      x: Inputs `[n, ...]`. Floating-point inputs are given to the model as float32, integers as int32.
      y: Labels: integers `[n, ...]`, in `[0, num_classes)`, or floating-point targets `[n, ...]` as float32.
      num_classes: Number of classes; by default the largest label plus one, or for targets their last dim.
      split: `"train"` or `"validation"`, for reports.
      name: For reports and errors.
      on_bad_record: What to do about labels out of range and values that are NaN or infinite: `"fail"`, or `"skip"` to
        train without such examples and count them.

    Returns:
      A source of `n` examples in the order given. The arrays are copied once.

    Raises:
      ConfigError: Different lengths, values that are no numbers, integers that int32 cannot hold, or an example that
        cannot be used.
    """
    if on_bad_record not in ("fail", "skip"):
        raise unknown_name("on_bad_record", on_bad_record, ("fail", "skip"))
    x, y = np.asarray(x), np.asarray(y)
    for what, values in (("inputs", x), ("labels", y)):
        if not (np.issubdtype(values.dtype, np.number) or values.dtype == bool) or np.iscomplexobj(values):
            raise ConfigError(
                f"{name}: the {what} have dtype {values.dtype}; real numbers are needed. Convert them, e.g. with "
                "np.asarray(..., np.float32); numbers of classes as integers."
            )
    if len(x) != len(y):
        raise ConfigError(f"{name}: {len(x)} inputs and {len(y)} labels; there must be one label per input.")
    integer_labels = np.issubdtype(y.dtype, np.integer)
    if num_classes is None:
        num_classes = (int(y.max(initial=-1)) + 1) if integer_labels else int(y.shape[-1] if y.ndim > 1 else 1)
    for what, values in (("inputs", x), ("labels", y)):
        if np.issubdtype(values.dtype, np.integer) and values.size:
            low, high = values.min(), values.max()
            if low < -(2**31) or high >= 2**31:
                raise ConfigError(
                    f"{name}: integer {what} reach from {low} to {high}; int32 holds -2^31 to 2^31 - 1. Map them to "
                    "smaller numbers (ids, e.g. with keras.layers.Hashing), or give them as floating-point numbers."
                )
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is found below
        kept_x = x.astype(np.int32 if np.issubdtype(x.dtype, np.integer) else np.float32)
        kept_y = y.astype(np.int32 if integer_labels else np.float32)
    info = SourceInfo(
        name=name,
        task=CLASSIFICATION,
        split=split,
        num_examples=len(x),
        input_spec=tf.TensorSpec(kept_x.shape[1:], kept_x.dtype),
        label_spec=tf.TensorSpec(kept_y.shape[1:], kept_y.dtype),
        num_classes=num_classes,
        storage="memory",
        digest=_digest(kept_x, kept_y),
    )
    size = kept_x.nbytes + kept_y.nbytes

    def read(indices: tf.Tensor) -> Batch:
        x, y, _ = held.tensors()
        return tf.gather(x, indices), tf.gather(y, indices)

    def usable(indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(held.tensors()[2], indices)

    source = Source(info=info, read=read, kept_bytes=size, skip=on_bad_record == "skip")
    good = check_values(source, kept_x, kept_y)
    held = Held(lambda: (kept_x, kept_y, good))
    return dataclasses.replace(source, load=held.tensors, usable=None if good.all() else usable)


def _digest(*arrays: np.ndarray) -> str:
    """Of the arrays' content: about a second for a gigabyte."""
    content = hashlib.blake2b(digest_size=16)
    for values in arrays:
        content.update(np.ascontiguousarray(values).data.cast("B") if values.size else b"")
    return content.hexdigest()

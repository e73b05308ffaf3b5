"""Examples that a program already holds."""

from __future__ import annotations

from tfpar.config import ConfigError
from tfpar.inputs.source import CLASSIFICATION, Batch, Held, Source, SourceInfo, check_labels

import numpy as np
import tensorflow as tf


def from_arrays(
    x: np.ndarray, y: np.ndarray, *, num_classes: int | None = None, split: str = "train", name: str = "arrays"
) -> Source:
    """A source over arrays in memory.

    Args:
      x: Inputs `[n, ...]`. Floating-point inputs are given to the model as float32, integers as int32.
      y: Labels: integers `[n, ...]`, in `[0, num_classes)`, or floating-point targets `[n, ...]` as float32.
      num_classes: Number of classes; by default the largest label plus one, or for targets their last dim.
      split: `"train"` or `"validation"`, for reports.
      name: For reports and errors.

    Returns:
      A source of `n` examples in the order given. The arrays are copied once.

    Raises:
      ConfigError: Different lengths, or a label out of range.
    """
    x, y = np.asarray(x), np.asarray(y)
    if len(x) != len(y):
        raise ConfigError(f"{name}: {len(x)} inputs and {len(y)} labels; there must be one label per input.")
    integer_labels = np.issubdtype(y.dtype, np.integer)
    if num_classes is None:
        num_classes = (int(y.max(initial=-1)) + 1) if integer_labels else int(y.shape[-1] if y.ndim > 1 else 1)
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
    )
    if integer_labels:
        check_labels(info, kept_y)
    size = kept_x.nbytes + kept_y.nbytes
    held = Held(lambda: (kept_x, kept_y))

    def read(indices: tf.Tensor) -> Batch:
        x, y = held.tensors()
        return tf.gather(x, indices), tf.gather(y, indices)

    return Source(info=info, read=read, kept_bytes=size, load=held.tensors)

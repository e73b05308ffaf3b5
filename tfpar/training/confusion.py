"""Confusion matrices: counts of classes and predictions during an evaluation."""

from __future__ import annotations

from typing import Any

from tfpar import inputs

import tensorflow as tf

# More classes would not fit in a picture, and are not worth sending with every evaluation.
MAX_CLASSES = 64


def classes_of(info: inputs.SourceInfo) -> int:
    """The number of classes if each example has one as its label and there are not too many; otherwise 0."""
    spec = info.label_spec
    one_label = isinstance(spec, tf.TensorSpec) and spec.shape.rank == 0 and spec.dtype.is_integer
    return info.num_classes if one_label and 2 <= info.num_classes <= MAX_CLASSES else 0


def counts(batch: Any, outputs: Any, classes: int) -> tf.Tensor:
    """Examples by label (rows) and by the class with the largest output (columns).

    Args:
      batch: `(x, y, weight)` with a leading axis of one micro-batch; examples of weight 0 do not count.
      outputs: The model's outputs for it.
      classes: The number of classes; 0 for no counts.

    Returns:
      Float32 `[classes, classes]`; zeros if the outputs are not one number per class.
    """
    if not tf.is_tensor(outputs) or outputs.shape.rank != 2 or outputs.shape[-1] != classes:
        return tf.zeros([classes, classes])
    y = batch[1].y if isinstance(batch[1], inputs.Weighted) else batch[1]
    is_example = tf.cast(batch[2][0] > 0, tf.float32)
    labels = tf.one_hot(tf.cast(y[0], tf.int32), classes) * is_example[:, tf.newaxis]
    return tf.linalg.matmul(labels, tf.one_hot(tf.argmax(outputs, axis=-1), classes), transpose_a=True)

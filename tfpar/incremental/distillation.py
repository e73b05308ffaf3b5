"""Learning without forgetting (Li and Hoiem 2016): the earlier model's outputs are additional labels.

These outputs are computed once for the examples of a task, so that training needs no second model: the label of an
example is its class, followed by the earlier model's logits. Augmentation changes the inputs but not these logits.

Shapes: m examples of a batch, n examples of a task, k classes of the earlier model.
"""

from __future__ import annotations

import dataclasses
import hashlib

from tfpar.inputs.source import Batch, LazyTensors, Source

import keras
import numpy as np
import tensorflow as tf


def with_logits(source: Source, logits: np.ndarray, teacher: str) -> Source:
    """Returns the examples with labels `[1 + k]`: the class, and the logits of the earlier model.

    Args:
      source: Examples with one class each.
      logits: Float32 `[n, k]`, in the order of the examples.
      teacher: Identifies the earlier model. The fingerprint of the source contains it in place of the logits, because
        the last bits of the logits depend on the processor.
    """
    table = LazyTensors(lambda: [logits.astype(np.float32)])

    def read(indices: tf.Tensor) -> Batch:
        x, y = source.read(indices)
        earlier = tf.gather(table.tensors()[0], indices)
        return x, tf.concat([tf.cast(y, tf.float32)[:, tf.newaxis], earlier], axis=1)

    content = hashlib.blake2b(f"{source.info.fingerprint} {teacher}".encode(), digest_size=16).hexdigest()
    info = dataclasses.replace(
        source.info, label_spec=tf.TensorSpec([1 + logits.shape[1]], tf.float32), num_classes=0, digest=content
    )
    return dataclasses.replace(source, info=info, read=read)


class DistillationLoss(keras.losses.Loss):
    """Cross-entropy of the class, and of the earlier model's probabilities at a temperature T (equations 1 and 3).

    The second term covers the classes of the earlier model. It is multiplied by T², so that its gradients do not shrink
    with T (Hinton et al. 2015).

    Args:
      strength: Factor of the second term.
      temperature: T.
    """

    def __init__(self, strength: float, temperature: float) -> None:
        super().__init__(name="distillation_loss")
        self._strength, self._temperature = strength, temperature

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the loss of each example, float32 `[m]`, for labels `[m, 1 + k]` and logits `[m, classes]`."""
        logits, earlier = tf.cast(y_pred, tf.float32), tf.cast(y_true[:, 1:], tf.float32)
        label = tf.cast(y_true[:, 0], tf.int32)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
        target = tf.nn.softmax(earlier / self._temperature)
        ours = logits[:, : earlier.shape[1]] / self._temperature
        kept = tf.nn.softmax_cross_entropy_with_logits(target, ours)
        return loss + self._strength * self._temperature**2 * kept


def accuracy_beside_logits() -> keras.metrics.Metric:
    """Returns an accuracy metric for labels from `with_logits`."""

    def accuracy(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.equal(tf.cast(y_true[:, 0], tf.int64), tf.argmax(y_pred, axis=-1)), tf.float32)

    return keras.metrics.MeanMetricWrapper(accuracy, name="accuracy")

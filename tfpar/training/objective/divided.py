"""Losses and metrics that can be computed from divided logits without gathering them (`DividedLogits`)."""

from __future__ import annotations

from typing import Any

from tfpar.optim import keras_internals
from tfpar.parallel.tensor.divided_logits import DividedLogits, divided

import keras
import tensorflow as tf


def divided_loss(loss: keras.losses.Loss, y: Any, outputs: Any) -> tf.Tensor | None:
    """The result of `loss.call` from divided logits; None if the logits are whole, or the loss needs them whole.

    Args:
      loss: A Keras loss. Sparse categorical cross-entropies of logits can use divided logits.
      y: Class numbers `[m, ...]`.
      outputs: Logits `[m, ..., V]`, or this device's part of them.
    """
    logits = _logits(outputs)
    if logits is None or getattr(loss, "fn", None) is not keras.losses.sparse_categorical_crossentropy:
        return None
    known = keras.losses.SparseCategoricalCrossentropy
    if type(loss).call is not known.call or type(loss).__call__ is not known.__call__:  # a subclass may do more
        return None
    return _cross_entropy(logits, y, loss.get_config(), loss.dtype)


def divided_metric(
    metric: keras.metrics.Metric, y: tf.Tensor, outputs: tf.Tensor, weight: tf.Tensor
) -> list[tf.Tensor] | None:
    """The state that examples add to a metric, from divided logits; None as for `divided_loss`.

    Args:
      metric: A Keras metric. Accuracies and cross-entropies of class numbers can use divided logits.
      y: Class numbers `[m, ...]`.
      outputs: As for `divided_loss`.
      weight: Weights of examples or positions, `[m]` or `[m, ...]`.
    """
    logits = _logits(outputs)
    if logits is None:
        return None
    if type(metric) is keras.metrics.SparseCategoricalAccuracy:
        y = _class_numbers(logits, y)
        values: tf.Tensor | None = tf.cast(tf.equal(tf.cast(y, tf.int32), logits.best()), metric.dtype)
    elif type(metric) is keras.metrics.SparseCategoricalCrossentropy:
        values = _cross_entropy(logits, y, metric.get_config(), metric.dtype)
    else:
        values = None
    if values is None:
        return None
    if (mask := keras_internals.mask_of(outputs)) is not None:
        mask, weight = keras_internals.matching_ranks(tf.cast(mask, weight.dtype), weight)
        weight *= mask
    state = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metric.variables]
    with keras.StatelessScope(state_mapping=state) as scope:
        # As `MeanMetricWrapper.update_state` continues in Keras 3.15 once it has the values.
        keras.metrics.Mean.update_state(metric, values, sample_weight=weight)
    return [scope.get_current_value(variable) for variable in metric.variables]


def _logits(outputs: Any) -> DividedLogits | None:
    return None if keras.tree.is_nested(outputs) else divided(outputs)


def _cross_entropy(logits: DividedLogits, y: Any, options: dict[str, Any], dtype: str) -> tf.Tensor | None:
    """`keras.losses.sparse_categorical_crossentropy` with these options; None unless they are for logits."""
    rank = logits.own.shape.rank
    if not options.get("from_logits") or options.get("axis", -1) not in (-1, rank - 1):
        return None
    y = _class_numbers(logits, y)
    ignored = options.get("ignore_class")
    if ignored is None:
        return logits.cross_entropy(y, dtype)
    counts = tf.not_equal(y, tf.cast(ignored, y.dtype))
    values = tf.where(counts, logits.cross_entropy(tf.where(counts, y, tf.zeros([], y.dtype)), dtype), 0.0)
    return keras_internals.set_mask(values, counts)


def _class_numbers(logits: DividedLogits, y: tf.Tensor) -> tf.Tensor:
    """Class numbers without a last dimension of size 1, which Keras takes as well."""
    return tf.squeeze(y, -1) if y.shape.rank == logits.own.shape.rank and y.shape[-1] == 1 else y

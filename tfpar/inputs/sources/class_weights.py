"""Weights of classes, for imbalanced data, as sample weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import TypeVar

from tfpar.config import ConfigError
from tfpar.inputs import structures
from tfpar.inputs.source import LANGUAGE_MODEL, Batch, LazyTensors, Source, Weighted
from tfpar.inputs.streams import StreamSource

import keras
import numpy as np
import tensorflow as tf

_AnySource = TypeVar("_AnySource", bound=Source | StreamSource)

# More classes than any data set has; a table of this length takes 4 MiB.
_MOST_CLASSES = 1 << 20


def with_class_weight(source: _AnySource, class_weight: Mapping[int, float]) -> _AnySource:
    """Returns the same examples with a sample weight that depends on the class, as Keras' `fit(class_weight=...)`.

    Labels of one dim, or whose last dim is 1, are class numbers and are rounded; other labels are one-hot, or scores of
    classes, of which the largest counts. Labels [n, ..., classes] or [n, ..., 1] of three dims or more get a weight per
    position.

    Args:
      source: Examples with one label each, without sample weights.
      class_weight: Weight by class number; a class that is missing has weight 1.

    Returns:
      A source whose labels are `Weighted`.

    Raises:
      ConfigError: The source has no label, several, sample weights of its own, or tokens; or a key is not a class
        number, or a weight not a finite number.
    """
    info = source.info
    table = _table(class_weight)
    if info.task == LANGUAGE_MODEL:
        raise ConfigError(f"class_weight: {info.name} has tokens as labels, not classes. Leave out class_weight.")
    if not structures.is_single(info.label_spec):
        what = "no labels" if structures.is_empty(info.label_spec) else "several labels"
        raise ConfigError(
            f"class_weight: {info.name} has {what}, but class_weight needs one label per example. Give sample_weight "
            "instead."
        )
    if not structures.is_empty(info.weight_spec):
        raise ConfigError(
            f"class_weight: {info.name} has sample weights already. Multiply them by the weights of the classes, and "
            "leave out class_weight."
        )
    tensors = LazyTensors(lambda: [table])
    text = info.digest + repr(sorted((int(key), float(value)) for key, value in class_weight.items()))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if isinstance(source, StreamSource):
        return dataclasses.replace(
            source, retarget=lambda y: Weighted(y, _weights(y, tensors.tensors()[0])), digest=digest
        )

    def read(indices: tf.Tensor) -> Batch:
        x, y = source.read(indices)
        return x, Weighted(y, _weights(y, tensors.tensors()[0]))

    rank = info.label_spec.shape.rank
    positions = info.label_spec.shape[: max(rank - 1, 0)]
    weighted_info = dataclasses.replace(info, weight_spec=tf.TensorSpec(positions, table.dtype), digest=digest)
    return dataclasses.replace(source, info=weighted_info, read=read)


def _table(class_weight: Mapping[int, float]) -> np.ndarray:
    """Returns the weights by class number, [largest number + 2]; the last entry, 1, is for all other classes."""
    if not isinstance(class_weight, Mapping) or not class_weight:
        raise ConfigError(
            f"class_weight={class_weight!r} must be a dict from class number to weight, e.g. {{0: 1.0, 1: 5.0}}."
        )
    for key, value in class_weight.items():
        if not isinstance(key, (int, np.integer)) or not 0 <= key < _MOST_CLASSES:
            raise ConfigError(
                f"class_weight: {key!r} is not a class number. Keys must be integers from 0 to {_MOST_CLASSES - 1}."
            )
        try:
            finite = np.isfinite(float(value))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise ConfigError(f"class_weight: the weight of class {key} is {value!r}, but must be a finite number.")
    table = np.ones(int(max(class_weight)) + 2, keras.config.floatx())
    for key, value in class_weight.items():
        table[int(key)] = float(value)
    return table


def _weights(y: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """Returns the weights of labels [n, ...]: [n], or [n, ...] without the last dim of the labels."""
    if y.shape.rank >= 2 and y.shape[-1] != 1:
        classes = tf.argmax(y, axis=-1, output_type=tf.int64)
    else:
        numbers = tf.squeeze(y, axis=-1) if y.shape.rank >= 2 else y
        classes = tf.cast(tf.round(numbers) if numbers.dtype.is_floating else numbers, tf.int64)
    others = tf.size(table, tf.int64) - 1
    return tf.gather(table, tf.where((classes >= 0) & (classes < others), classes, others))

"""Metrics as sums: their state adds up over examples, micro-batches, replicas, and steps.

Only Keras metrics whose state is zero after a reset and grows by addition are taken. A step then sends their state with
the gradients, and a value is computed from the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.config import ConfigError

import keras
import numpy as np
import tensorflow as tf


def build_metrics(
    metrics: Sequence[Any], loss: Any = None, output_shape: Sequence[int | None] | None = None
) -> list[keras.metrics.Metric]:
    """Keras metrics from names, instances or functions, checked to be additive.

    Args:
      metrics: Names (`"sparse_categorical_accuracy"`), metric instances, or functions `(y, outputs) -> [m]`.
        `"accuracy"` is the accuracy that belongs to the loss, as in Keras' `compile`.
      loss: As for `per_example_loss`; tells what `"accuracy"` is.
      output_shape: Shape of the model's only output, for metrics such as `F1Score` that make their state when they
        first see outputs; None where it is not known.

    Raises:
      ConfigError: A metric whose state is not a sum, an unknown name, or one name for two.
    """
    built: list[keras.metrics.Metric] = []
    for item in metrics:
        try:
            metric = accuracy(loss) if item == "accuracy" else keras.metrics.get(item)
        except ValueError as error:
            raise ConfigError(f"metrics: {item!r} is not known to Keras: {error}") from error
        if not isinstance(metric, keras.metrics.Metric):
            metric = keras.metrics.MeanMetricWrapper(metric, name=getattr(metric, "__name__", "metric"))
        if not metric.variables:
            _make_state(metric, output_shape)
        if any(bool(keras.ops.any(variable != 0)) for variable in metric.variables):
            raise ConfigError(
                f"metrics: the state of {metric.name!r} does not start at zero, so it is no sum over examples and "
                "cannot be combined across replicas. Use a metric that counts or averages."
            )
        if any(metric.name == other.name for other in built):
            raise ConfigError(f"metrics: two are called {metric.name!r}. Give one of them another name=....")
        built.append(metric)
    return built


def _make_state(metric: keras.metrics.Metric, output_shape: Sequence[int | None] | None) -> None:
    """Lets a metric make the state that it makes for the first outputs it sees."""
    try:
        if not output_shape or not all(isinstance(size, int) for size in output_shape[1:]):
            raise ValueError(f"the model's outputs have no shape that is known (found {output_shape})")
        seen = tf.zeros([1, *output_shape[1:]])
        metric.update_state(seen, seen)
        metric.reset_state()
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise ConfigError(
            f"metrics: {metric.name!r} makes its state from the outputs it sees, which fails for this model: {error}"
        ) from error


def accuracy(loss: Any) -> keras.metrics.Metric:
    """The accuracy that belongs to a cross-entropy, named `accuracy`.

    Args:
      loss: As for `per_example_loss`.

    Raises:
      ConfigError: The loss is none of Keras' cross-entropies.
    """
    resolved = keras.losses.get(loss)
    kind = getattr(resolved, "__name__", type(resolved).__name__).replace("_", "").lower()
    if kind == "sparsecategoricalcrossentropy":
        return keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    if kind == "categoricalcrossentropy":
        return keras.metrics.CategoricalAccuracy(name="accuracy")
    if kind == "binarycrossentropy":
        logits = isinstance(resolved, keras.losses.Loss) and resolved.get_config().get("from_logits")
        return keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0 if logits else 0.5)
    raise ConfigError(
        f"metrics: what 'accuracy' is cannot be told from loss={loss!r}. Name one of Keras' metrics, e.g. "
        "'sparse_categorical_accuracy' for labels that are numbers of classes."
    )


def variables(metrics: Sequence[keras.metrics.Metric]) -> list[keras.Variable]:
    """The state of all metrics, in one flat list."""
    return [variable for metric in metrics for variable in metric.variables]


def sums(metrics: Sequence[keras.metrics.Metric], y: Any, outputs: Any, weight: tf.Tensor) -> list[tf.Tensor]:
    """The state that these examples add to each metric. Pure: no metric is changed.

    Args:
      metrics: From `build_metrics`.
      y: Labels `[m, ...]`.
      outputs: Outputs of the model `[m, ...]`.
      weight: Float32 `[m]`, weights of the examples.

    Returns:
      Float32 tensors in the order and of the shapes of `variables(metrics)`.
    """
    found: list[tf.Tensor] = []
    for metric in metrics:
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
        updated = metric.stateless_update_state(zeros, y, outputs, sample_weight=weight)
        found += [tf.cast(value, tf.float32) for value in updated]
    return found


def results(metrics: Sequence[keras.metrics.Metric], state: Sequence[Any]) -> dict[str, float]:
    """Metric values from summed metric state.

    Args:
      metrics: From `build_metrics`.
      state: Arrays in the order of `variables(metrics)`.

    Returns:
      Value by metric name. A metric with several values gives one entry `name/key` each, a vector `name/0` and so on.
    """
    found: dict[str, float] = {}
    position = 0
    for metric in metrics:
        own = state[position : position + len(metric.variables)]
        position += len(metric.variables)
        values = [tf.cast(value, variable.dtype) for variable, value in zip(metric.variables, own, strict=True)]
        value = metric.stateless_result(values)
        for key, part in (value if isinstance(value, dict) else {"": value}).items():
            name, flat = f"{metric.name}/{key}" if key else metric.name, np.ravel(part)
            if np.ndim(part) == 0:
                found[name] = float(flat[0])
            else:
                found |= {f"{name}/{place}": float(number) for place, number in enumerate(flat)}
    return found

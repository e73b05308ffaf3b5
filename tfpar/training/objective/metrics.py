"""Metrics as sums: their state adds up over examples, micro-batches, replicas, and steps.

Only Keras metrics whose state is zero after a reset and grows by addition are accepted. A step then sends their state
with the gradients, and a value is computed from the total. What Keras does with masks and sample weights is done here
with the same classes; the weight of each example, which is 0 for padding, is multiplied into the sample weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_compile, keras_internals
from tfpar.parallel.tensor.divided_logits import gathered
from tfpar.training.objective.divided import divided_metric
from tfpar.training.objective.outputs import examples_of
from tfpar.training.objective.weighting import expanded

import keras
import numpy as np
import tensorflow as tf

_ERRORS = (ValueError, TypeError, KeyError, IndexError, tf.errors.InvalidArgumentError)


@dataclasses.dataclass(frozen=True, eq=False)
class MetricTerm:
    """A metric of one output.

    Attributes:
      metric: A Keras metric whose state has been created.
      name: The name under which it is reported.
      y: Index into the flat labels.
      outputs: Index into the flat outputs.
      weighted: Whether sample weights count in it.
      weight_rank: Number of the labels' dims for which it takes weights; 1 is a weight per example.
    """

    metric: keras.metrics.Metric
    name: str
    y: int
    outputs: int
    weighted: bool
    weight_rank: int = 1

    def sums(self, y: tf.Tensor, outputs: tf.Tensor, sample_weight: Any, weight: tf.Tensor) -> list[tf.Tensor]:
        """The state that examples add. Pure: the metric itself does not change.

        Args:
          y: Labels `[m, ...]`.
          outputs: Outputs `[m, ...]`.
          sample_weight: `[m]` or `[m, ...]`, or None; without effect unless `weighted`.
          weight: Float32 `[m]`, 0 for padding.
        """
        weight = self._weights(y, outputs, sample_weight if self.weighted else None, weight)
        state = divided_metric(self.metric, y, outputs, weight)
        if state is not None:
            return state
        outputs = gathered(outputs)
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in self.metric.variables]
        return self.metric.stateless_update_state(zeros, y, outputs, sample_weight=weight)

    def _weights(self, y: tf.Tensor, outputs: tf.Tensor, sample_weight: Any, weight: tf.Tensor) -> tf.Tensor:
        # Only metrics that average a function use a mask; they multiply it by weights of its rank.
        mask = keras_internals.mask_of(outputs) if isinstance(self.metric, keras.metrics.MeanMetricWrapper) else None
        rank = 1 if mask is None else mask.shape.rank
        if sample_weight is not None:
            sample_weight = tf.cast(sample_weight, tf.float32)
            rank = max(rank, sample_weight.shape.rank)
            weight = expanded(weight, rank) * expanded(sample_weight, rank)
        weight = expanded(weight, rank)
        if self.weight_rank > rank or self.weight_rank > 1:
            shape = keras.ops.shape(y)[: self.weight_rank]  # a batch without its padding has no known size
            weight = tf.broadcast_to(expanded(weight, self.weight_rank), shape)
        return weight


def build_metrics(
    metrics: Any,
    weighted_metrics: Any,
    losses: Sequence[keras_compile.ResolvedLoss],
    output_names: Sequence[str] | None,
    y: Any,
    outputs: Any,
) -> list[MetricTerm]:
    """Metrics as `compile` takes them, assigned to outputs, with their state created and checked to be additive.

    `"accuracy"` is the accuracy that belongs to the loss of the output if that is one of Keras' cross-entropies, and
    otherwise the one that Keras picks by the shapes of labels and outputs.

    Args:
      metrics: A list, or one for each output: names, metric objects or functions `(y, outputs) -> [m, ...]`.
      weighted_metrics: The same, of metrics in which sample weights count.
      losses: The losses of the outputs.
      output_names: Names of the outputs, or None.
      y: Labels, a structure of `tf.TensorSpec` with static shapes.
      outputs: Outputs, the same.

    Raises:
      ConfigError: A metric whose state is not a sum or that does not suit labels and outputs, or an unknown name.
    """
    for argument, value in (("metrics", metrics), ("weighted_metrics", weighted_metrics)):
        if value and not isinstance(value, (list, tuple, dict)):
            raise ConfigError(f"{argument}={value!r}: expected a list, or a dict by output. Give {argument}=[...].")
    if not metrics and not weighted_metrics:
        return []
    try:
        resolved = keras_compile.resolve_metrics(metrics, weighted_metrics, output_names, y, outputs)
    except _ERRORS as error:
        raise ConfigError(f"metrics: {error}") from error
    chosen = {id(leaf) for leaf in keras.tree.flatten([metrics, weighted_metrics])}
    labels, predictions = keras.tree.flatten(y), keras.tree.flatten(outputs)
    terms = []
    for term in resolved:
        if term.name in ("loss", "examples"):
            raise ConfigError(f"metrics: {term.name!r} is reported anyway. Give the metric another name=....")
        metric = term.metric
        if id(metric) not in chosen and metric.name in ("accuracy", "acc"):
            metric = _accuracy_of(losses, term.outputs, metric)
        terms.append(_checked(term._replace(metric=metric), labels[term.y], predictions[term.outputs]))
    return terms


def _accuracy_of(
    losses: Sequence[keras_compile.ResolvedLoss], output: int, by_shape: keras.metrics.Metric
) -> keras.metrics.Metric:
    """The accuracy that belongs to the cross-entropy of an output; `by_shape` for any other loss."""
    for term in losses:
        if term.outputs == output:
            found = accuracy(term.loss, by_shape.name)
            return by_shape if found is None else found
    return by_shape


def accuracy(loss: keras.losses.Loss, name: str = "accuracy") -> keras.metrics.Metric | None:
    """The accuracy that belongs to a cross-entropy, or None for another loss.

    Args:
      loss: A loss object; a function is in `fn`.
      name: Name of the metric.
    """
    function = getattr(loss, "fn", None)
    if function is keras.losses.sparse_categorical_crossentropy:
        return keras.metrics.SparseCategoricalAccuracy(name=name)
    if function is keras.losses.categorical_crossentropy:
        return keras.metrics.CategoricalAccuracy(name=name)
    if function is keras.losses.binary_crossentropy:
        logits = loss.get_config().get("from_logits")
        return keras.metrics.BinaryAccuracy(name=name, threshold=0.0 if logits else 0.5)
    return None


def _checked(term: keras_compile.ResolvedMetric, y: tf.TensorSpec, outputs: tf.TensorSpec) -> MetricTerm:
    """The metric with its state created, after a check on dummy examples that its state is a sum over examples."""
    metric, (labels, values) = _unused(term.metric), examples_of([y, outputs])
    try:
        whole, part = _values(metric, labels, values, weighted=False)
    except _ERRORS as error:
        try:  # some metrics need weights, which they always get in a step
            whole, part = _values(metric, labels, values, weighted=True)
        except _ERRORS:
            raise ConfigError(
                f"metrics: {metric.name!r} does not suit labels {y.dtype.name}{_example_shape(y)} and outputs "
                f"{_example_shape(outputs)} of an example: {error}"
            ) from error
    if _has_state(metric):
        raise ConfigError(
            f"metrics: the state of {metric.name!r} does not start at zero, so it is not a sum over examples and "
            "cannot be combined across replicas. Use a metric that counts or averages."
        )
    ones = tf.ones([len(labels)])
    for rank in range(1, len(y.shape) + 1):
        found = MetricTerm(metric, term.name, term.y, term.outputs, term.weighted, rank)
        try:
            sums = [found.sums(labels, values, None, weight) for weight in (ones, tf.concat([ones[1:], [0.0]], 0))]
            first = found.sums(labels[:2], values[:2], None, ones[:2])
            rest = found.sums(labels[2:], values[2:], None, ones[2:])
        except _ERRORS:
            continue
        added = [one + other for one, other in zip(first, rest, strict=True)]
        pairs = [(sums[0], whole), (sums[1], part), (added, whole)]
        if all(_equal(_result(metric, state), expected) for state, expected in pairs):
            return found
    if isinstance(metric, keras.metrics.MeanMetricWrapper):  # what Keras puts around a function
        remedy = "A function of labels and outputs returns one value per example, as keras.ops.mean(..., axis=-1) does."
    else:
        remedy = "Use a metric that counts or averages with weights."
    raise ConfigError(
        f"metrics: {metric.name!r} cannot be summed over examples: its state must grow by addition, and an example of "
        f"sample_weight 0, which padding has, must add nothing to it. {remedy}"
    )


def _has_state(metric: keras.metrics.Metric) -> bool:
    return any(bool(keras.ops.any(variable != 0)) for variable in metric.variables)


def _unused(metric: keras.metrics.Metric) -> keras.metrics.Metric:
    """The metric, or a new one like it if it was used before, as metrics of a compiled model may have been."""
    try:
        return type(metric).from_config(metric.get_config()) if _has_state(metric) else metric
    except _ERRORS:
        return metric


def _values(metric: keras.metrics.Metric, y: tf.Tensor, outputs: tf.Tensor, *, weighted: bool) -> list[Any]:
    """The values of a metric for all examples and for all but the last, without weights or with those of 1."""
    values = []
    for count in (len(y), len(y) - 1):
        arguments = (y[:count], outputs[:count], *([tf.ones([count])] if weighted else []))
        with keras.StatelessScope():  # some metrics create their state from the first outputs
            metric.update_state(*arguments)
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
        values.append(_result(metric, metric.stateless_update_state(zeros, *arguments)))
    return values


def _result(metric: keras.metrics.Metric, state: Sequence[Any]) -> Any:
    """The value of a metric for a state: a tensor, or a structure of tensors."""
    # Not `stateless_result`: a metric whose result is its variable would return the variable, not the state.
    with keras.StatelessScope(state_mapping=list(zip(metric.variables, state, strict=True))):
        return keras.tree.map_structure(_tensor, metric.result())


def _tensor(value: Any) -> Any:
    return value.value if isinstance(value, keras.Variable) else value


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(np.allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs)


def _example_shape(tensor: tf.TensorSpec) -> list[int | None]:
    return list(tensor.shape[1:])


def variables(metrics: Sequence[keras.metrics.Metric]) -> list[keras.Variable]:
    """The state of all metrics, in one flat list."""
    return [variable for metric in metrics for variable in metric.variables]


def updated(
    metrics: Sequence[keras.metrics.Metric], sums: Sequence[Any]
) -> tuple[list[keras.metrics.Metric], list[Any]]:
    """The metrics whose state is not zero, and their state."""
    found: list[keras.metrics.Metric] = []
    states: list[Any] = []
    parts = iter(sums)
    for metric in metrics:
        state = [next(parts) for _ in metric.variables]
        if any(np.any(np.asarray(part)) for part in state):
            found.append(metric)
            states += state
    return found, states


def results(
    metrics: Mapping[str, keras.metrics.Metric], state: Sequence[Any], without: Sequence[str] = ()
) -> dict[str, Any]:
    """Metric values from summed metric state.

    Args:
      metrics: By the name to report.
      state: Arrays in the order of `variables`.
      without: Names of metrics to leave out.

    Returns:
      The values that Keras' `fit` logs, by metric name: numbers, or arrays for metrics that return arrays. A metric
      whose result is a dict gives an entry per key, named by the key alone unless that name is taken: then `name/key`.
    """
    found: dict[str, Any] = {}
    position = 0
    for metric_name, metric in metrics.items():
        own = state[position : position + len(metric.variables)]
        position += len(metric.variables)
        if metric_name in without:
            continue
        values = [tf.cast(value, variable.dtype) for variable, value in zip(metric.variables, own, strict=True)]
        value = _result(metric, values)
        named = value if isinstance(value, dict) else {metric_name: value}
        taken = {"loss", "examples"} | found.keys() | (metrics.keys() - {metric_name})
        for key, part in named.items():
            array = np.asarray(part)
            found[f"{metric_name}/{key}" if key in taken else key] = array if array.ndim else float(array)
    return found

"""The private parts of Keras that concern the arguments of `compile`: which loss and which metric belong to which
output.

Keras' own classes decide, on symbolic labels and outputs, so that every structure means what it means in `fit`. This
module returns their decisions as indices into the flat labels and outputs. `INTERNALS` is as in `keras_internals.py`.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfpar.optim.keras_internals import Internal, set_untracked

import keras
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics

INTERNALS = (
    Internal("Functional", "keras.src.models.functional", "objective", "a model whose outputs are known before a call"),
    Internal("_outputs_struct", "Functional", "objective", "the symbolic outputs in the structure of a call's result"),
    Internal("CompileLoss", "keras.src.trainers.compile_utils", "objective", "which loss belongs to which output"),
    Internal("_flat_losses", "CompileLoss", "objective", "the losses in order, with path, weight and name"),
    Internal("CompileMetrics", "keras.src.trainers.compile_utils", "objective", "which metric belongs to which output"),
    Internal("_flat_metrics", "CompileMetrics", "objective", "the metrics by output, with the name of the output"),
    Internal("_flat_weighted_metrics", "CompileMetrics", "objective", "those that sample weights count in"),
    Internal("_flatten_y", "CompileMetrics", "objective", "labels and outputs in the order of the metrics"),
    Internal("_compile_loss", "Model", "Trainer", "the arguments `loss`, `loss_weights` of `compile`"),
    Internal("_user_loss_weights", "CompileLoss", "Trainer", "`loss_weights` as they were given"),
    Internal("_compile_metrics", "Model", "Trainer", "the arguments `metrics`, `weighted_metrics` of `compile`"),
    Internal("_user_metrics", "CompileMetrics", "Trainer", "`metrics` as they were given"),
    Internal("_user_weighted_metrics", "CompileMetrics", "Trainer", "`weighted_metrics` as they were given"),
)


def symbolic_outputs(model: keras.Model) -> Any:
    """The structure of symbolic outputs of a model that is a graph of layers; None for a model that is not."""
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model._outputs_struct
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        return model.outputs[0] if len(model.outputs) == 1 else None
    return None


class ResolvedLoss(NamedTuple):
    """A loss and its arguments.

    Attributes:
      loss: The loss.
      weight: Its factor in the total loss, or None for 1.
      name: Under which Keras reports it, `NAME_loss`, where there are several.
      y: Indices into the flat labels, in the structure that the loss takes.
      outputs: Indices into the flat outputs.
    """

    loss: keras.losses.Loss
    weight: float | None
    name: str
    y: Any
    outputs: Any


class ResolvedMetric(NamedTuple):
    """A metric and its arguments.

    Attributes:
      metric: The metric.
      name: Under which Keras reports it.
      y: Index into the flat labels.
      outputs: Index into the flat outputs.
      weighted: Whether sample weights count in it.
    """

    metric: keras.metrics.Metric
    name: str
    y: int
    outputs: int
    weighted: bool


def resolve_losses(
    loss: Any, loss_weights: Any, output_names: Sequence[str] | None, y: Any, outputs: Any
) -> list[ResolvedLoss]:
    """Assigns losses to outputs and labels as `compile` and `fit` do.

    Args:
      loss: As `compile` takes it.
      loss_weights: As `compile` takes them.
      output_names: Names of the model's outputs, if it has any.
      y: Labels, a structure of `tf.TensorSpec`.
      outputs: Outputs, a structure of `tf.TensorSpec`.

    Raises:
      ValueError, KeyError, TypeError: The structures do not fit; as Keras raises it, or an output has no labels.
    """
    compiled = CompileLoss(loss, loss_weights, output_names=output_names)
    pairs: list[tuple[Any, Any]] = []

    def record(y: Any, outputs: Any, _: Any) -> Any:
        pairs.append((y, outputs))
        return keras.ops.zeros(())

    build = compiled.build

    def build_recorder(y: Any, outputs: Any) -> None:
        build(y, outputs)
        losses.extend(compiled._flat_losses)
        compiled._flat_losses = [entry._replace(loss=record, loss_weights=None) for entry in losses]
        compiled.metrics[:] = [None] * len(losses)  # `call` does not change them, and iterates over all losses

    losses: list[Any] = []
    compiled.build = build_recorder  # `call` arranges the labels before it builds
    try:
        compiled.call(y, outputs)
    except (ValueError, KeyError):
        if isinstance(y, dict) and isinstance(loss, dict):
            _check_labels(y, [name for name, one in loss.items() if one is not None])
        raise
    places = [_places(y), _places(outputs)]
    if any(id(leaf) not in places[0] for labels, _ in pairs for leaf in keras.tree.flatten(labels)):
        if isinstance(y, dict):
            _check_labels(y, [entry.name for entry in losses])
        raise ValueError("labels and outputs have different names")
    return [
        ResolvedLoss(entry.loss, entry.loss_weights, entry.name, *map(_indices, places, pair))
        for entry, pair in zip(losses, pairs, strict=True)
    ]


def _check_labels(y: dict[str, Any], names: Sequence[str]) -> None:
    """Raises ValueError if an output with one of these names has no labels."""
    for name in names:
        if name not in y:
            raise ValueError(
                f"there are no labels for the output {name!r}. Labels are named: {', '.join(map(repr, y))}."
            )


def resolve_metrics(
    metrics: Any, weighted_metrics: Any, output_names: Sequence[str] | None, y: Any, outputs: Any
) -> list[ResolvedMetric]:
    """Assigns metrics to outputs and labels, and names them, as `compile` and `fit` do.

    Args:
      metrics: As `compile` takes them.
      weighted_metrics: As `compile` takes them.
      output_names: Names of the model's outputs, if it has any.
      y: Labels, a structure of `tf.TensorSpec`.
      outputs: Outputs, a structure of `tf.TensorSpec`.

    Raises:
      ValueError, TypeError: The structures do not fit, or a metric is unknown; as Keras raises it.
    """
    compiled = CompileMetrics(metrics, weighted_metrics, output_names=output_names)
    compiled.build(y, outputs)
    lists = [compiled._flat_metrics, compiled._flat_weighted_metrics]
    # A stand-in for each metric returns the metric in place of its result: `result` gives the names.
    compiled._flat_metrics, compiled._flat_weighted_metrics = (list(map(_stand_in, flat)) for flat in lists)
    names = {id(metric): name for name, metric in compiled.result().items()}
    y_places, places = _places(y), _places(outputs)
    y, outputs = (compiled._flatten_y(part) for part in (y, outputs))
    return [
        ResolvedMetric(metric, names[id(metric)], y_places[id(label)], places[id(output)], weighted)
        for flat, weighted in zip(lists, (False, True), strict=True)
        for group, label, output in zip(flat, y, outputs, strict=False)
        for metric in (group.metrics if group else ())
    ]


def _stand_in(group: Any) -> Any:
    def entry(metric: keras.metrics.Metric) -> Any:
        return types.SimpleNamespace(name=metric.name, result=lambda: metric)

    return group and types.SimpleNamespace(metrics=list(map(entry, group.metrics)), output_name=group.output_name)


def _places(structure: Any) -> dict[int, int]:
    """The index of each leaf, by its identity."""
    return {id(leaf): index for index, leaf in enumerate(keras.tree.flatten(structure))}


def _indices(places: dict[int, int], structure: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: places[id(leaf)], structure)


def _without_loss_scale(optimizer: Any) -> Any:
    """The optimizer that `compile` was given: Keras 3.15 puts a LossScaleOptimizer around it under `mixed_float16`."""
    kind = keras.optimizers.LossScaleOptimizer
    if not isinstance(optimizer, kind):
        return optimizer
    put = kind(keras.optimizers.SGD())
    same = (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (put.initial_scale, put.dynamic_growth_steps)
    return optimizer.inner_optimizer if same else optimizer


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """The arguments of a compiled model's `compile`: optimizer, loss, metrics and weights, as far as they were
    given."""
    losses, metrics = model._compile_loss, model._compile_metrics
    arguments = {
        "optimizer": _without_loss_scale(model.optimizer),
        "loss": losses and model.loss,
        "loss_weights": losses and losses._user_loss_weights,
        "metrics": metrics and metrics._user_metrics,
        "weighted_metrics": metrics and metrics._user_weighted_metrics,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def set_loss(model: keras.Model, loss: Any, loss_weights: Any) -> None:
    """Gives a model the loss that Keras' own `compute_loss` reads, as `compile` does, and leaves the rest.

    Args:
      model: A built Keras model.
      loss: As `compile` takes it.
      loss_weights: As `compile` takes them.
    """
    if not model.compiled:
        model.compile(optimizer=None, loss=loss, loss_weights=loss_weights)
    elif model.loss is not loss or loss_weights is not None:
        compiled = CompileLoss(loss, loss_weights, output_names=getattr(model, "output_names", None))
        set_untracked(model, loss=loss, _compile_loss=compiled)

"""The shapes and types of the tensors of a graph, on a worker that holds only some of the variables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.optim import keras_calls, keras_internals
from tfpar.optim.keras_draws import drawing
from tfpar.parallel.held import Held, held_by
from tfpar.parallel.model_axis import ModelAxis, at_no_place
from tfpar.training.pipeline.graph import GraphStep, Values, run_steps

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Spec:
    """The properties of a tensor of the graph that are known before it is computed.

    Attributes:
      tensor: Its shape and type on a device.
      mask: Those of its mask, if it has one.
      whole: Whether all devices of a model axis have the same tensor, and not each a part.
    """

    tensor: tf.TensorSpec
    mask: tf.TensorSpec | None
    whole: bool


def specs_of(
    model: keras.Model,
    graph: Any,
    steps: Sequence[GraphStep],
    inputs: Sequence[tf.Tensor],
    operation_fn: Any,
    axis: ModelAxis | None,
) -> Mapping[int, Spec]:
    """The specs of all tensors that steps compute, by identity. Nothing is run.

    Args:
      model: The model.
      graph: Its graph.
      steps: All steps.
      inputs: Tensors like those of a call, in the order of the graph's inputs.
      operation_fn: Returns the callable to use in place of a layer.
      axis: The model axis, if there is one.
    """

    def traced(shape_of: Callable[[Held], tuple[int, ...]]) -> dict[int, tuple[tf.TensorSpec, tf.TensorSpec | None]]:
        found: dict[int, tuple[tf.TensorSpec, tf.TensorSpec | None]] = {}

        def forward(*given: tf.Tensor) -> None:
            values: Values = dict(zip(map(id, graph.inputs), given, strict=True))
            scope = keras.StatelessScope()
            scope.state_mapping.update({id(each): zeros_like(each, shape_of) for each in model.variables})
            with scope, drawing(), as_if_here(model, shape_of):
                run_steps(steps, values, operation_fn)
            for each, value in values.items():
                mask = keras_internals.mask_of(value)
                of_mask = None if mask is None else tf.TensorSpec.from_tensor(mask)
                found[each] = tf.TensorSpec.from_tensor(value), of_mask

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
        tf.function(forward, autograph=False).get_concrete_function(*specs)
        return found

    if axis is None:
        return {each: Spec(tensor, mask, whole=True) for each, (tensor, mask) in traced(_part_shape).items()}
    with axis.on_no_device():
        of_device = traced(_part_shape)
    with at_no_place():
        undivided = traced(_whole_shape)
    return {
        each: Spec(tensor, mask, tensor.shape.is_fully_defined() and tensor.shape == undivided[each][0].shape)
        for each, (tensor, mask) in of_device.items()
    }


def _part_shape(held: Held) -> tuple[int, ...]:
    return held.part_shape


def _whole_shape(held: Held) -> tuple[int, ...]:
    return held.shape


def as_if_here(
    model: keras.Model, shape_of: Callable[[Held], tuple[int, ...]] = _part_shape
) -> contextlib.AbstractContextManager[None]:
    """In this context each variable reports the shape that it has on a worker that holds it, because layers ask for
    shapes."""
    held = [(variable, held_by(variable)) for variable in model.variables]
    return keras_calls.shapes_of_variables((variable, shape_of(where)) for variable, where in held if where)


def zeros_like(variable: keras.Variable, shape_of: Callable[[Held], tuple[int, ...]] = _part_shape) -> tf.Tensor:
    """Zeros in the shape of a variable's part on a device of its holders."""
    held = held_by(variable)
    return tf.zeros(shape_of(held) if held else variable.shape, variable.dtype)

"""The shapes and types of the tensors of a graph, on a worker that holds only some of the variables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.split import held_by
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
    whole: bool = True


def specs_of(
    model: keras.Model, graph: Any, steps: Sequence[GraphStep], inputs: Sequence[tf.Tensor], operation_fn: Any
) -> Mapping[int, Spec]:
    """The specs of all tensors that steps compute, by identity. Nothing is run.

    Call it at the place of a model axis, if there is one: values within divided layers have the shapes of parts.

    Args:
      model: The model.
      graph: Its graph.
      steps: All steps.
      inputs: Tensors like those of a call, in the order of the graph's inputs.
      operation_fn: Returns the callable to use in place of a layer.
    """
    found: dict[int, Spec] = {}
    shapes = {each: shape for step in steps for each, shape in zip(step.makes, step.shapes, strict=True)}

    def forward(*given: tf.Tensor) -> None:
        values: Values = dict(zip(map(id, graph.inputs), given, strict=True))
        scope = keras.StatelessScope()
        scope.state_mapping.update({id(variable): zeros_like(variable) for variable in model.variables})
        with scope, as_if_here(model):
            run_steps(steps, values, operation_fn)
        for each, value in values.items():
            mask = keras_internals.mask_of(value)
            of_mask = None if mask is None else tf.TensorSpec.from_tensor(mask)
            whole = shapes.get(each, (None,))[1:] == tuple(value.shape[1:])
            found[each] = Spec(tf.TensorSpec.from_tensor(value), of_mask, whole)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    tf.function(forward, autograph=False).get_concrete_function(*specs)
    return found


def as_if_here(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """In this context each variable reports the shape that it has on a worker that holds it, because layers ask for
    shapes."""
    held = [(variable, held_by(variable)) for variable in model.variables]
    return keras_calls.shapes_of_variables((variable, where.part_shape) for variable, where in held if where)


def zeros_like(variable: keras.Variable) -> tf.Tensor:
    """Zeros in the shape of a variable's part on a device of its holders."""
    held = held_by(variable)
    return tf.zeros(held.part_shape if held else variable.shape, variable.dtype)

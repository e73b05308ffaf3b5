"""What a worker that holds only some of the variables must know of the stages of others: the shapes and types of their
tensors, and how many seeds they draw."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.optim import keras_calls, keras_internals
from tfpar.optim.keras_draws import drawing
from tfpar.optim.keras_internals import is_seed_state
from tfpar.parallel.held import Held, held_by
from tfpar.parallel.model_axis import ModelAxis, at_no_place
from tfpar.training.pipeline.graph import Values, run_steps
from tfpar.training.pipeline.stage_program import Stage

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


@dataclasses.dataclass(frozen=True)
class StageSpecs:
    """The properties of the stages of a model that are known before any runs.

    Attributes:
      tensors: The specs of all tensors that stages compute, by identity.
      draws: For each stage, how many seeds a call of it draws from each seed generator, by the `id` of the generator's
        state.
    """

    tensors: Mapping[int, Spec]
    draws: Sequence[Mapping[int, int]]


class _CountedDraws(keras.StatelessScope):
    """Counts how often the states of seed generators are assigned: once for each seed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        if is_seed_state(update[0]):
            self.counts[id(update[0])] = self.counts.get(id(update[0]), 0) + 1


def specs_of(
    model: keras.Model,
    graph: Any,
    stages: Sequence[Stage],
    inputs: Sequence[tf.Tensor],
    operation_fn: Any,
    axis: ModelAxis | None,
) -> StageSpecs:
    """The specs of all stages. Nothing is run.

    Args:
      model: The model.
      graph: Its graph.
      stages: All stages.
      inputs: Tensors like those of a call, in the order of the graph's inputs.
      operation_fn: Returns the callable to use in place of a layer.
      axis: The model axis, if there is one.
    """
    draws: list[Mapping[int, int]] = []

    def traced(shape_of: Callable[[Held], tuple[int, ...]]) -> dict[int, tuple[tf.TensorSpec, tf.TensorSpec | None]]:
        found: dict[int, tuple[tf.TensorSpec, tf.TensorSpec | None]] = {}

        def forward(*given: tf.Tensor) -> None:
            values: Values = dict(zip(map(id, graph.inputs), given, strict=True))
            scope = _CountedDraws()
            scope.state_mapping.update({id(each): zeros_like(each, shape_of) for each in model.variables})
            draws.clear()
            with scope, drawing(), as_if_here(model, shape_of):
                for stage in stages:
                    scope.counts = {}
                    run_steps(stage.steps, values, operation_fn)
                    draws.append(scope.counts)
            for each, value in values.items():
                mask = keras_internals.mask_of(value)
                of_mask = None if mask is None else tf.TensorSpec.from_tensor(mask)
                found[each] = tf.TensorSpec.from_tensor(value), of_mask

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
        tf.function(forward, autograph=False).get_concrete_function(*specs)
        return found

    if axis is None:
        whole = {each: Spec(tensor, mask, whole=True) for each, (tensor, mask) in traced(_part_shape).items()}
        return StageSpecs(whole, draws)
    with axis.on_no_device():
        of_device = traced(_part_shape)
    with at_no_place():
        undivided = traced(_whole_shape)
    tensors = {
        each: Spec(tensor, mask, tensor.shape.is_fully_defined() and tensor.shape == undivided[each][0].shape)
        for each, (tensor, mask) in of_device.items()
    }
    return StageSpecs(tensors, draws)


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

"""Traces a forward and a backward pass of a model, to count what its layers cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tfpar.models import graph_cost
from tfpar.optim import keras_calls, keras_compile
from tfpar.optim.keras_draws import drawing
from tfpar.parallel.model_axis import Place
from tfpar.parallel.tensor.divided_logits import kept_divided
from tfpar.training.pipeline.graph import GraphStep, Values, run_steps

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class CountedPlace(Place):
    """A device of a model axis that only records the bytes that it would send.

    Attributes:
      noted: Bytes of each call, and whether it is one of the forward pass.
      devices: Devices on the axis.
    """

    devices: int = 1
    noted: list[tuple[float, bool]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, devices: int) -> CountedPlace:
        group: Any = None
        return cls(group, "", itertools.count(), devices=devices)

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return self.devices

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        return self._noted(x, forward=True)

    def enter(self, x: tf.Tensor) -> tf.Tensor:
        return self._noted(x, forward=False)  # its gradient, of the same shape

    def collect(self, x: tf.Tensor) -> tf.Tensor:
        half = self.devices * _elements(x) * x.dtype.size / 2  # of the bytes of a sum
        self.noted.append((half, True))
        return tf.stack([x] * self.devices)

    def _noted(self, x: tf.Tensor, *, forward: bool) -> tf.Tensor:
        self.noted.append((_elements(x) * max(x.dtype.size, 4), forward))
        return tf.identity(x)


def _elements(x: tf.Tensor) -> float:
    """The number of elements; 0 if it depends on the examples, as in `Place.sent`."""
    return float(x.shape.num_elements() or 0)


class Trace:
    """One traced forward and backward pass of one example.

    Attributes:
      flops: FLOPs of each layer in the forward pass.
      kept: Bytes that each layer keeps for the backward pass.
      sums: Bytes of each call along the model axis, and whether it is one of the forward pass, by layer.
      assigned: The trainable variables that the forward pass assigns, by identity.
    """

    def __init__(
        self,
        model: keras.Model,
        graph: Any,
        steps: Sequence[GraphStep],
        length: int,
        place: CountedPlace | None,
    ) -> None:
        self._model, self._steps, self._place = model, steps, place
        count = max(len(steps), 1)
        self.sums: list[list[tuple[float, bool]]] = [[] for _ in range(count)]
        self._ends: list[int] = []
        self._forward: list[tf.Operation] = []
        self.assigned: set[int] = set()
        if graph is not None:
            keras_calls.replace_graph_run(graph, self._run_graph)
        specs = [
            tf.TensorSpec([1, *(size or length for size in tensor.shape[1:])], tensor.dtype) for tensor in model.inputs
        ]
        weights, state = (
            [tf.TensorSpec(tuple(each.shape), each.dtype) for each in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        traced = tf.function(self._step, autograph=False).get_concrete_function(specs, weights, state).graph
        uncounted: list[str] = []
        operations = traced.get_operations()
        backward = operations[len(self._forward) :]
        numbers = {operation: number for number, operation in enumerate(self._forward)}
        ends = self._ends or [len(self._forward)]
        starts = [0, *ends[:-1]]
        self.flops = [
            float(graph_cost.flops_of(self._forward[start:end], uncounted))
            for start, end in zip(starts, ends, strict=True)
        ]
        self.kept = [0.0] * count
        saved = graph_cost.saved_tensors(self._forward, backward, traced.inputs[: len(specs)], uncounted)
        for tensor, size in saved:
            number = numbers.get(tensor.op, 0)
            owner = next((layer for layer, end in enumerate(ends) if number < end), count - 1)
            self.kept[owner] += size

    def _step(self, inputs: Any, weights: Any, state: Any) -> Any:
        with tf.GradientTape() as tape, kept_divided():
            tape.watch(weights)
            variables = [*self._model.trainable_variables, *self._model.non_trainable_variables]
            # Not `stateless_call`, whose scope cannot be asked which trainable variables were assigned.
            with drawing(), keras.StatelessScope([*zip(variables, [*weights, *state], strict=True)]) as scope:
                before = dict(scope.state_mapping)
                outputs = self._model(graph_cost.in_structure(self._model, inputs), training=True)
            trained = map(id, self._model.trainable_variables)
            self.assigned = {key for key in trained if scope.state_mapping[key] is not before[key]}
            loss = graph_cost.stand_in_loss(outputs)
        self._forward.extend(tf.compat.v1.get_default_graph().get_operations())
        if not self._steps and self._place:
            self.sums[0] += self._place.noted
        return [each for each in tape.gradient(loss, weights) if each is not None]

    def _run_graph(self, graph: Any, plain: Any, /, inputs: Any, **options: Any) -> Any:
        """Replaces `keras.Function._run_through_graph`."""
        operation_fn = options.get("operation_fn")
        if operation_fn is None or keras_calls.innermost_scope() is None:
            return plain(inputs, **options)
        values: Values = dict(zip(map(id, graph.inputs), tf.nest.flatten(inputs), strict=True))
        operations = tf.compat.v1.get_default_graph().get_operations
        for number, step in enumerate(self._steps):
            noted = len(self._place.noted) if self._place else 0
            run_steps([step], values, operation_fn)
            self._ends.append(len(operations()))
            if self._place:
                self.sums[number] += self._place.noted[noted:]
        outputs = [values[id(tensor)] for tensor in graph.outputs]
        return keras.tree.pack_sequence_as(keras_compile.symbolic_outputs(graph), outputs)

"""The graph of a functional model as a list of steps, which can be cut into stages."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.models import graph_cost
from tfpar.optim import keras_calls
from tfpar.optim.keras_draws import drawing

import keras
import tensorflow as tf

_TRIED_LENGTHS = (64, 8, 1)

# The values that a step reads and computes, by the identity of the symbolic tensors of the graph. Each call of a model
# inside it has identities of its own, which are negative.
Values = dict[int, Any]
# The identities that the symbolic tensors of a graph have in one call of it, by their `id`.
Keys = Mapping[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class GraphStep:
    """A call of a layer or operation, or a renaming of a tensor between a model and a model inside it.

    Attributes:
      name: Path of the layer.
      operation: The layer or operation; None for a change of names.
      reads: Identities of the tensors that it reads.
      makes: Identities of the tensors that it computes.
      run: `(values, operation_fn) -> made`, values in the order of `makes`.
      enters: Whether the call of a model inside begins here.
    """

    name: str
    operation: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    run: Callable[[Values, Callable[[Any], Any]], Sequence[Any]]
    enters: bool = False

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the layer."""
        return list(getattr(self.operation, "variables", ()))


def steps_of(graph: Any) -> list[GraphStep]:
    """The calls of a functional model in the order in which they run; for models inside it, the calls of their graphs.

    Args:
      graph: From `keras_calls.graph_of`.
    """
    return _steps_of(graph, {key: key for key in _tensors_of(graph)}, itertools.count(-1, -1))


def _steps_of(graph: Any, keys: Keys, fresh: Iterator[int]) -> list[GraphStep]:
    steps: list[GraphStep] = []
    for node in keras_calls.graph_nodes(graph):
        inner = keras_calls.graph_of(node.operation)
        if inner is None:
            steps.append(_call(node, keys))
            continue
        # The model may be called elsewhere, too, or share tensors with another one, which then have other values.
        inner_keys = {key: next(fresh) for key in _tensors_of(inner)}
        same = _ids(node.input_tensors) == _ids(inner.inputs)  # where the outer model was created
        if same:
            inner_keys |= {key: keys[key] for key in _ids(inner.inputs)}
        else:
            steps.append(_enter(node, inner, keys, inner_keys))
        steps += [*_steps_of(inner, inner_keys, fresh), _leave(node, inner, keys, inner_keys)]
    return steps


def beginnings_of(steps: Sequence[GraphStep]) -> list[tuple[int, list[str]]]:
    """Where stages may begin: for each call of a layer, the number of the first step that belongs to it, and the paths
    of the models inside that begin with it, and its own. Where such a model ends, nothing begins."""
    found: list[tuple[int, list[str]]] = []
    first, names = 0, list[str]()
    for place, step in enumerate(steps):
        first = first if names else place
        if step.operation is not None:
            found.append((first, [*names, step.name]))
        names = [*names, step.name] if step.enters else []
    return found


def run_steps(steps: Iterable[GraphStep], values: Values, operation_fn: Callable[[Any], Any]) -> None:
    """Runs steps one after the other; adds their results to `values`."""
    for step in steps:
        values.update(zip(step.makes, step.run(values, operation_fn), strict=False))


def crossing(steps: Sequence[GraphStep], place: int, outputs: Iterable[int], inputs: Iterable[int]) -> list[int]:
    """Tensors that the steps before `place` compute and later steps read, or the model returns.

    Args:
      steps: All steps.
      place: Number of the first step after the cut.
      outputs: Identities of the tensors that the model returns.
      inputs: The model's inputs, which every stage gets.
    """
    given = set(inputs)
    made: dict[int, None] = {}
    for step in steps[:place]:
        if step.operation is None and set(step.reads) <= given:
            given |= set(step.makes)
        made.update(dict.fromkeys(step.makes))
    read = {each for step in steps[place:] for each in step.reads} | set(outputs)
    return [each for each in made if each in read and each not in given]


def _call(node: Any, keys: Keys) -> GraphStep:
    def run(values: Values, operation_fn: Callable[[Any], Any]) -> Sequence[Any]:
        args, kwargs = node.arguments.fill_in(_given(node, keys, values))
        return tf.nest.flatten(operation_fn(node.operation)(*args, **kwargs))

    name = getattr(node.operation, "path", "") or node.operation.name
    return GraphStep(name, node.operation, _keys_of(node.input_tensors, keys), _keys_of(node.outputs, keys), run)


def _enter(node: Any, inner: Any, keys: Keys, inner_keys: Keys) -> GraphStep:
    def run(values: Values, _: Any) -> Sequence[Any]:
        args, kwargs = node.arguments.fill_in(_given(node, keys, values))
        given = args[0] if args else kwargs["inputs"]
        return keras_calls.standard_inputs(inner, given)

    reads, makes = _keys_of(node.input_tensors, keys), _keys_of(inner.inputs, inner_keys)
    return GraphStep(node.operation.name, None, reads, makes, run, enters=True)


def _leave(node: Any, inner: Any, keys: Keys, inner_keys: Keys) -> GraphStep:
    reads = _keys_of(inner.outputs, inner_keys)

    def run(values: Values, _: Any) -> Sequence[Any]:
        return [values[key] for key in reads]

    return GraphStep(node.operation.name, None, reads, _keys_of(node.outputs, keys), run)


def _given(node: Any, keys: Keys, values: Values) -> Values:
    """The values that a node reads, by the `id` of their tensors."""
    return {key: values[keys[key]] for key in _ids(node.input_tensors)}


def _tensors_of(graph: Any) -> tuple[int, ...]:
    outputs = [tensor for node in keras_calls.graph_nodes(graph) for tensor in node.outputs]
    return _ids([*graph.inputs, *outputs])


def _keys_of(tensors: Iterable[Any], keys: Keys) -> tuple[int, ...]:
    return tuple(keys[key] for key in _ids(tensors))


def _ids(tensors: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(id, tensors))


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The costs of steps, for one example.

    Attributes:
      flops: FLOPs of each step: those of matrix products and convolutions, and one for each element that an operation
        returns.
      elements: Size of each tensor, by its identity.
    """

    flops: list[int]
    elements: Mapping[int, int]


def costs_of(model: keras.Model, graph: Any, steps: Sequence[GraphStep]) -> StepCosts:
    """Counts the cost of steps, without running them.

    Args:
      model: A built functional model. Dimensions of its inputs that are not known are tried with several sizes.
      graph: Its graph.
      steps: Its steps.
    """
    for length in _TRIED_LENGTHS[:-1]:
        with contextlib.suppress(ValueError, tf.errors.InvalidArgumentError):  # may exceed a table of positions
            return _costs_with(model, graph, steps, length)
    return _costs_with(model, graph, steps, _TRIED_LENGTHS[-1])


def _costs_with(model: keras.Model, graph: Any, steps: Sequence[GraphStep], length: int) -> StepCosts:
    flops: list[int] = []
    elements: dict[int, int] = {}

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        values: Values = dict(zip(_ids(graph.inputs), inputs, strict=True))
        scope = keras.StatelessScope()
        for variable in model.variables:
            scope.state_mapping[id(variable)] = tf.zeros(variable.shape, variable.dtype)
        operations = tf.compat.v1.get_default_graph().get_operations
        with scope, drawing():
            for step in steps:
                before = len(operations())
                run_steps([step], values, lambda operation: operation)
                made = operations()[before:]
                uncounted: list[str] = []
                flops.append(graph_cost.flops_of(made, uncounted) + sum(map(_elements, made)))
                elements.update({each: _size(values[each]) for each in step.makes if each in values})
        return [values[id(tensor)] for tensor in graph.outputs]

    specs = [
        tf.TensorSpec([1, *(size or length for size in tensor.shape[1:])], tensor.dtype) for tensor in graph.inputs
    ]
    tf.function(forward, autograph=False).get_concrete_function(*specs)
    return StepCosts(flops, elements)


def crossing_elements(graph: Any, steps: Sequence[GraphStep], costs: StepCosts) -> list[int]:
    """Elements that cross a cut before each step, for one example; -1 where no cut is allowed."""
    inputs, outputs = [*map(id, graph.inputs)], [*map(id, graph.outputs)]

    def elements(place: int) -> int:
        if not place or steps[place].operation is None:  # a renaming, which is not worth a stage
            return -1
        return sum(costs.elements.get(each, 0) for each in crossing(steps, place, outputs, inputs))

    return [elements(place) for place in range(len(steps))]


def _elements(operation: tf.Operation) -> int:
    return sum(map(_size, operation.outputs))


def _size(tensor: Any) -> int:
    shape = getattr(tensor, "shape", None)
    return math.prod(shape.as_list()) if shape is not None and shape.is_fully_defined() else 0

"""Counts the costs of a model's layers for every size of the model axis, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.models import graph_cost
from tfpar.optim import keras_calls, keras_compile
from tfpar.optim.keras_draws import drawing
from tfpar.parallel.division import Split
from tfpar.parallel.model_axis import Place, at_place
from tfpar.parallel.planner.costs import LayerCost, ModelCosts, Weight
from tfpar.parallel.split import mark
from tfpar.parallel.tensor import layout as tensor_layout
from tfpar.parallel.tensor.calls import divide_calls, heads_of
from tfpar.parallel.tensor.divided_logits import kept_divided
from tfpar.parallel.tensor.ways import weight_of
from tfpar.parallel.tensor.weight_layouts import find_weight_layout, names_weights
from tfpar.parallel.weight_shards import can_be_sharded, layers_that_gather
from tfpar.training.model import recompute
from tfpar.training.pipeline.graph import GraphStep, Values, costs_of, crossing_elements, run_steps, steps_of

import keras
import tensorflow as tf


def count_model(
    model: keras.Model, sizes: Sequence[int], layout: Mapping[str, Any] | None = None, *, length: int = 64
) -> ModelCosts:
    """Counts FLOPs, activations, sums and weights of each layer. Leaves the model unchanged.

    Args:
      model: A built Keras model with symbolic inputs.
      sizes: Sizes of the model axis to count for, besides 1.
      layout: How layers are divided, see `find_layout`.
      length: Assumed length of unknown dimensions of inputs.

    Raises:
      ConfigError: The model has no symbolic inputs, so that its cost is not known before it runs.
    """
    if not getattr(model, "inputs", None):
        raise ConfigError(
            f"--mesh=auto: model {model.name!r} has no symbolic inputs, so its cost is not known before it runs. Build "
            "it with the functional API, or name a mesh, such as --mesh=data:2."
        )
    graph = keras_calls.graph_of(model)
    steps = steps_of(graph) if graph is not None else []
    counter = _Counter(model, graph, steps, length)
    try:
        whole = counter.with_gathering(counter.with_recompute(counter.layers({}, None)))
        divided, undivided = {}, {}
        for size in sizes:
            try:
                with _divided(model, size, layout) as splits:
                    divided[size] = counter.with_kept_of(counter.layers(splits, _CountedPlace.of(size)), whole)
            except ConfigError as error:
                undivided[size] = str(error)
            except ValueError as error:  # a custom layer whose parts do not fit together
                reason = keras_calls.without_surroundings(error)
                undivided[size] = (
                    f"--mesh=model:{size}: model {model.name!r} fails when it is divided in this way "
                    f"({reason.splitlines()[0] if reason else error})."
                )
    finally:
        _restore(model)
    common: dict[str, Any] = {"name": model.name, "layers": {1: whole, **divided}, "undivided": undivided}
    common["example"] = sum(
        each.dtype.size * math.prod(size or length for size in each.shape[1:])
        for each in (tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in model.inputs)
    )
    if graph is None:
        uncut = f"Model {model.name!r} has its own call method, not a graph of layers, so it cannot be cut into stages."
        return ModelCosts(**common, uncut=uncut)
    costs = costs_of(model, graph, steps)
    width = tf.as_dtype(model.compute_dtype).size
    crossing = [max(elements * width, -1) for elements in crossing_elements(graph, steps, costs)]
    return ModelCosts(**common, cut_costs=costs.flops, crossing=crossing)


def _restore(model: keras.Model) -> None:
    recompute.recompute_activations(model, recompute.NONE)


@contextlib.contextmanager
def _divided(model: keras.Model, size: int, layout: Mapping[str, Any] | None) -> Iterator[dict[int, Split]]:
    """In this context calls of layers are divided; the splits of variables, by identity."""
    find = find_weight_layout if names_weights(layout) else tensor_layout.find_layout
    layouts = find(model, size, layout or {})
    specs = [(layer, layer.input_spec) for layer, _ in layouts.values()]
    try:
        divide_calls(layouts, heads_of(model))
        found = [(layer, each) for layer, layout in layouts.values() for each in layout.splits.items()]
        yield {id(weight_of(layer, name)): split for layer, (name, split) in found}
    finally:
        for layer, spec in specs:
            layer.input_spec = spec
        _restore(model)


@contextlib.contextmanager
def _marked(divided: Sequence[tuple[keras.Variable, Split]]) -> Iterator[None]:
    """In this context variables count as divided, which says how many of their elements are padding."""
    for variable, split in divided:
        mark(variable, split)
    try:
        yield
    finally:
        for variable, _ in divided:
            mark(variable, None)


@dataclasses.dataclass(frozen=True, eq=False)
class _CountedPlace(Place):
    """A device of a model axis that only records the bytes that it would send.

    Attributes:
      noted: Bytes of each call, and whether it is one of the forward pass.
      devices: Devices on the axis.
    """

    devices: int = 1
    noted: list[tuple[float, bool]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, devices: int) -> _CountedPlace:
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
        half = self.devices * float(math.prod(x.shape)) * x.dtype.size / 2  # of the bytes of a sum
        self.noted.append((half, True))
        return tf.stack([x] * self.devices)

    def _noted(self, x: tf.Tensor, *, forward: bool) -> tf.Tensor:
        self.noted.append((float(math.prod(x.shape)) * max(x.dtype.size, 4), forward))
        return tf.identity(x)


class _Counter:
    """Traces forward and backward passes of a model, and attributes their costs to layers."""

    def __init__(self, model: keras.Model, graph: Any, steps: Sequence[GraphStep], length: int) -> None:
        self._model, self._graph, self._steps, self._length = model, graph, steps, length
        self._places = {id(variable): index for index, variable in enumerate(model.variables)}

    def layers(self, splits: Mapping[int, Split], place: _CountedPlace | None) -> tuple[LayerCost, ...]:
        """The costs of each layer on one device."""
        divided = [(each, split) for each in self._model.variables if (split := splits.get(id(each)))]
        shapes = [(each, split.part_shape(each.shape)) for each, split in divided]
        at = at_place(place) if place else contextlib.nullcontext()
        with keras_calls.shapes_of_variables(shapes), _marked(divided), at:
            traced = _Trace(self._model, self._graph, self._steps, self._length, place)
        names = [step.name for step in self._steps] or [self._model.name]
        variables = [step.variables for step in self._steps] or [self._model.variables]
        return tuple(
            LayerCost(
                name=name,
                flops=flops,
                kept=kept,
                kept_recomputed=kept,
                kept_gathered=kept,
                sums=tuple(size for size, _ in sums),
                forward_sums=tuple(size for size, forward in sums if forward),
                weights=tuple(self._weights(own, splits, traced.assigned)),
            )
            for name, own, flops, kept, sums in zip(
                names, variables, traced.flops, traced.kept, traced.sums, strict=True
            )
        )

    def with_recompute(self, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """The layers, with the bytes that they keep if blocks are computed again."""
        in_stretches = False
        try:
            recompute.recompute_activations(self._model, recompute.BLOCKS)
            in_stretches = self._graph is not None and keras_calls.runs_graph_otherwise(self._graph)
            again = () if in_stretches else self.layers({}, None)
        except ConfigError:  # there are no blocks, or one assigns its weights, which a run refuses
            return tuple(layers)
        finally:
            _restore(self._model)
        if in_stretches:
            return tuple(layers) if any(layer.assigns for layer in layers) else self._in_stretches(layers)
        return self.with_kept_of(
            layers,
            [
                dataclasses.replace(
                    layer, kept_recomputed=min(layer.kept, other.kept), recomputed=other.kept < layer.kept
                )
                for layer, other in zip(layers, again, strict=True)
            ],
        )

    def with_gathering(self, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """The layers, with the bytes that they keep if those that gather weights are called again."""
        blocks = [each for each in layers_that_gather(self._model) if any(map(can_be_sharded, each.variables))]
        numbers = {self._places[id(each)] for block in blocks for each in block.variables}
        layers = tuple(
            dataclasses.replace(layer, gathers=any(weight.index in numbers for weight in layer.weights))
            for layer in layers
        )
        if any(layer.gathers and layer.assigns for layer in layers):
            return layers  # such a layer cannot be called again: a run refuses `--shard=weights`
        recompute.recompute_layers(self._model, blocks)
        again = self.layers({}, None)
        _restore(self._model)
        return tuple(
            dataclasses.replace(layer, kept_gathered=min(layer.kept, other.kept))
            for layer, other in zip(layers, again, strict=True)
        )

    def with_kept_of(self, layers: Sequence[LayerCost], others: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """The layers, with the costs of `others` where layers are called again."""
        return tuple(
            dataclasses.replace(
                layer,
                kept_recomputed=min(layer.kept, other.kept_recomputed),
                recomputed=other.recomputed,
                kept_gathered=min(layer.kept, other.kept_gathered),
                gathers=other.gathers,
            )
            for layer, other in zip(layers, others, strict=True)
        )

    def _in_stretches(self, layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
        """Divides the layers into about as many segments as their square root; one tensor of each segment is kept."""
        weighted = sum(bool(layer.weights) for layer in layers)
        stretch = sum(layer.kept for layer in layers) / max(round(math.sqrt(weighted)), 1)
        found, filled = [], 0.0
        for layer in layers:
            begins = filled == 0.0
            filled = 0.0 if filled + layer.kept >= stretch else filled + layer.kept
            found.append(dataclasses.replace(layer, kept_recomputed=layer.kept if begins else 0.0, recomputed=True))
        return tuple(found)

    def _weights(
        self, variables: Sequence[keras.Variable], splits: Mapping[int, Split], assigned: Collection[int]
    ) -> Iterator[Weight]:
        for variable in variables:
            split = splits.get(id(variable))
            width = tf.as_dtype(variable.dtype).size
            size = width * math.prod(variable.shape)
            yield Weight(
                index=self._places[id(variable)],
                size=size if split is None else width * math.prod(split.part_shape(variable.shape)),
                trainable=variable.trainable,
                divided=split is not None,
                assigned=id(variable) in assigned,
            )


class _Trace:
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
        place: _CountedPlace | None,
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

"""Counts the costs of a model's layers for every size of the model axis, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_calls
from tfpar.parallel.division import Split
from tfpar.parallel.model_axis import at_place
from tfpar.parallel.planner.costs import LayerCost, ModelCosts, Weight
from tfpar.parallel.split import mark
from tfpar.parallel.tensor import layout as tensor_layout
from tfpar.parallel.tensor.calls import divide_calls, heads_of
from tfpar.parallel.tensor.ways import weight_of
from tfpar.parallel.tensor.weight_layouts import find_weight_layout, names_weights
from tfpar.parallel.weight_shards import can_be_sharded, layers_that_gather
from tfpar.training.model import recompute
from tfpar.training.pipeline.graph import GraphStep, costs_of, crossing_elements, steps_of
from tfpar.training.planning.tracing import CountedPlace, Trace

import keras
import tensorflow as tf

# What to do if the costs of a model are not known, by the option that needs them.
_WAYS_OUT = {"--mesh=auto": "name a mesh, such as --mesh=data:2", "--device_memory": "leave out --device_memory"}


def way_out_of(option: str) -> str:
    """What to do if the costs of a model are not known, which `--mesh=auto` or `--device_memory` needs."""
    return _WAYS_OUT[option]


def count_model(
    model: keras.Model,
    sizes: Sequence[int],
    layout: Mapping[str, Any] | None = None,
    *,
    length: int = 64,
    recomputing: str = recompute.BLOCKS,
    state: Mapping[int, int] | None = None,
    option: str = "--mesh=auto",
) -> ModelCosts:
    """Counts FLOPs, activations, sums and weights of each layer. Leaves the model unchanged.

    Args:
      model: A built Keras model with symbolic inputs.
      sizes: Sizes of the model axis to count for, besides 1.
      layout: How layers are divided, see `find_layout`.
      length: Assumed length of unknown dimensions of inputs.
      recomputing: The value of `--recompute` to count for, besides `none`.
      state: Bytes of the optimizer's state of each weight, by `id` of the weight.
      option: The option that needs the costs, for errors.

    Raises:
      ConfigError: The model has no symbolic inputs, so that its cost is not known before it runs; or it cannot be
        divided over any of the sizes as the layout says.
    """
    if not getattr(model, "inputs", None):
        raise ConfigError(
            f"{option}: model {model.name!r} has no symbolic inputs, so its cost is not known before it runs. Build it "
            f"with the functional API, or {way_out_of(option)}."
        )
    graph = keras_calls.graph_of(model)
    steps = steps_of(graph) if graph is not None else []
    counter = _Counter(model, graph, steps, length, state or {})
    try:
        layers, kept_whole = counter.with_recompute(counter.layers({}, None), recomputing)
        whole = counter.with_gathering(layers)
        divided, undivided = _count_divided(counter, model, sizes, layout, whole)
    finally:
        _restore(model)
    if layout and undivided and not divided:  # a mistake in it is one for every size
        raise ConfigError(next(iter(undivided.values())))
    common: dict[str, Any] = {"name": model.name, "undivided": undivided, "kept_whole": kept_whole}
    common["layers"] = {1: whole, **divided}
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


def _count_divided(
    counter: _Counter,
    model: keras.Model,
    sizes: Sequence[int],
    layout: Mapping[str, Any] | None,
    whole: Sequence[LayerCost],
) -> tuple[dict[int, tuple[LayerCost, ...]], dict[int, str]]:
    """The layers for each size over which the model can be divided, and the reason for each other size."""
    divided, undivided = {}, {}
    for size in sizes:
        try:
            with _divided(model, size, layout) as splits:
                divided[size] = counter.with_kept_of(counter.layers(splits, CountedPlace.of(size)), whole)
        except ConfigError as error:
            undivided[size] = str(error)
        except ValueError as error:  # a custom layer whose parts do not fit together
            reason = keras_calls.without_surroundings(error)
            undivided[size] = (
                f"--mesh=model:{size}: model {model.name!r} fails when it is divided in this way "
                f"({reason.splitlines()[0] if reason else error})."
            )
    return divided, undivided


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


class _Counter:
    """Traces forward and backward passes of a model, and attributes their costs to layers."""

    def __init__(
        self, model: keras.Model, graph: Any, steps: Sequence[GraphStep], length: int, state: Mapping[int, int]
    ) -> None:
        self._model, self._graph, self._steps, self._length, self._state = model, graph, steps, length, state
        self._places = {id(variable): index for index, variable in enumerate(model.variables)}

    def layers(self, splits: Mapping[int, Split], place: CountedPlace | None) -> tuple[LayerCost, ...]:
        """The costs of each layer on one device."""
        divided = [(each, split) for each in self._model.variables if (split := splits.get(id(each)))]
        shapes = [(each, split.part_shape(each.shape)) for each, split in divided]
        at = at_place(place) if place else contextlib.nullcontext()
        with keras_calls.shapes_of_variables(shapes), _marked(divided), at:
            traced = Trace(self._model, self._graph, self._steps, self._length, place)
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

    def with_recompute(self, layers: Sequence[LayerCost], where: str) -> tuple[tuple[LayerCost, ...], str]:
        """The layers, with the bytes that they keep with a value of `--recompute`; and why a run would refuse it."""
        try:
            recompute.recompute_activations(self._model, where)
            if self._graph is not None and keras_calls.runs_graph_otherwise(self._graph):
                self._check_stretches(layers)
                return self._in_stretches(layers), ""
            again = self.layers({}, None)
        except ConfigError as error:  # no layer can be a block, or a block cannot be called again
            return tuple(layers), str(error)
        finally:
            _restore(self._model)
        kept = [
            dataclasses.replace(layer, kept_recomputed=min(layer.kept, other.kept), recomputed=other.kept < layer.kept)
            for layer, other in zip(layers, again, strict=True)
        ]
        return self.with_kept_of(layers, kept), ""

    def _check_stretches(self, layers: Sequence[LayerCost]) -> None:
        """Refuses what `recomputed` refuses of segments, which a trace of the single layers does not call again."""
        *called_again, _ = recompute.cut(keras_calls.graph_nodes(self._graph))
        operations = [node.operation for segment in called_again for node in segment]
        numbers = {self._places[id(each)] for one in operations for each in getattr(one, "variables", ())}
        for layer in layers:
            if any(weight.assigned and weight.index in numbers for weight in layer.weights):
                raise ConfigError(
                    f"--recompute=blocks: {layer.name} assigns its trainable weights in the forward pass, which the "
                    "backward pass must not repeat. Use --recompute=none, or name other layers with --recompute=REGEX."
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
            width, whole = tf.as_dtype(variable.dtype).size, math.prod(variable.shape)
            elements = whole if split is None else math.prod(split.part_shape(variable.shape))
            yield Weight(
                index=self._places[id(variable)],
                size=width * elements,
                state=self._state.get(id(variable), 0) * elements // max(whole, 1),
                trainable=variable.trainable,
                divided=split is not None,
                assigned=id(variable) in assigned,
            )

"""Sequence parallelism: between divided layers, each device of the model axis has some positions of every example.

The sums behind row layers leave each device with all of `[m, T, D]`, and all compute the same norms, dropout and
residual sums of it, and keep the same activations. Where blocks allow it, a device gets the sum of its T / t positions
alone, and all positions are gathered in front of the next column layer: a sum is that and a gather, so that no byte is
added (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

A block allows it by `divides_positions = True`, which says that between its column and row layers it takes the number
of positions from what these return, and that all else it does acts on each position by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.tensor.layout import OWN_NUMBERS, POSITIONS, LayerLayout, Layouts

import keras

_ATTRIBUTE = "tfpar_gradient_in_parts"


def divide_positions(model: keras.Model, layouts: Layouts, size: int) -> int:
    """Divides the positions in blocks that allow it, and between those that follow each other in the model's graph.

    Args:
      model: A built Keras model.
      layouts: From `find_layout`; those of blocks and of their layers are added and replaced.
      size: Devices on the model axis.

    Returns:
      Number of blocks.

    Raises:
      ConfigError: There is no such block, or positions have no equal parts.
    """
    blocks = [
        layer
        for layer in keras_internals.all_layers(model)
        if getattr(layer, "divides_positions", False) and _is_divided(layer, layouts)
    ]
    if not blocks:
        raise ConfigError(
            f"--sequence_parallel: model {model.name!r} has no divided block that allows it, as tfpar's "
            "TransformerBlock does (divides_positions). keras-hub's decoders cannot: they make masks for the positions "
            "that they get. Leave it out."
        )
    edges = _edges(model, blocks, size)
    for block in blocks:
        for inner in block.tensor_layout():
            layouts[id(inner)] = inner, dataclasses.replace(layouts[id(inner)][1], divides_positions=True)
        for inner in keras_internals.all_layers(block, include_self=False):
            if id(inner) not in layouts and getattr(inner, "seed_generator", None) is not None:
                layouts[id(inner)] = inner, LayerLayout(OWN_NUMBERS)
        layouts[id(block)] = block, LayerLayout(POSITIONS, edges=edges[id(block)])
        _mark_gradients(block, layouts)
    return len(blocks)


def _is_divided(block: keras.layers.Layer, layouts: Layouts) -> bool:
    """Whether the layers of a block are divided as it says."""
    ways = {id(inner): way.partition(":")[0] for inner, way in block.tensor_layout().items()}
    return all(key in layouts and layouts[key][1].way == way for key, way in ways.items())


def has_gradient_in_parts(variable: keras.Variable) -> bool:
    """Whether each device computes its positions' part of the gradient of a weight that is whole."""
    return bool(vars(variable).get(_ATTRIBUTE))


def _mark_gradients(block: keras.layers.Layer, layouts: Layouts) -> None:
    divided = {id(getattr(layer, name)) for layer, layout in layouts.values() for name in layout.splits}
    for variable in block.variables:
        if id(variable) not in divided:
            vars(variable)[_ATTRIBUTE] = True


def _edges(model: keras.Model, blocks: list[keras.layers.Layer], size: int) -> dict[int, tuple[bool, bool]]:
    """Of each block, whether it gets all positions, and whether it is to return all."""
    graph = keras_calls.graph_of(model)
    nodes = [] if graph is None else keras_calls.graph_nodes(graph)
    wanted = {id(tensor) for tensor in graph.outputs} if graph is not None else set()
    own: dict[int, Any] = {}
    for block in blocks:
        calls = [node for node in nodes if node.operation is block]
        if len(calls) == 1:
            own[id(block)] = calls[0]
            _check_positions(block, calls[0].input_tensors[0].shape[1], size)

    def returns_all(block: int) -> bool:
        (output,) = own[block].outputs
        readers = [node for node in nodes if any(tensor is output for tensor in node.input_tensors)]
        return id(output) in wanted or not readers or any(id(node.operation) not in own for node in readers)

    last = {block: returns_all(block) for block in own}
    made = {id(node.outputs[0]): block for block, node in own.items() if not last[block]}
    first = {block: id(node.input_tensors[0]) not in made for block, node in own.items()}
    return {id(block): (first.get(id(block), True), last.get(id(block), True)) for block in blocks}


def _check_positions(block: keras.layers.Layer, positions: int | None, size: int) -> None:
    if positions is not None and positions % size:
        raise ConfigError(
            f"--sequence_parallel: {block.path or block.name} has {positions} positions, of which {size} devices "
            "cannot have equal parts. Use another --mesh or sequence length, or leave it out."
        )

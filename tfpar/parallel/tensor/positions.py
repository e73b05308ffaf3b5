"""Sequence parallelism: between divided layers, each device of the model axis holds a part of the positions of every
example.

After the sum of a row layer, each device has all of `[m, T, D]`, and all devices compute the same norms, dropout and
residual sums and keep the same activations. Where blocks allow it, a device instead gets the sum of only its T / t
positions (a reduce-scatter), and all positions are gathered before the next column layer. An all-reduce sends the same
bytes as these two together, so nothing is added (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

A block allows this with `divides_positions = True`. It thereby promises that between its column and row layers it reads
the number of positions from their outputs, and that everything else in it treats each position independently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.tensor.attention import weights_of_all_heads
from tfpar.parallel.tensor.ways import OWN_NUMBERS, POSITIONS, LayerLayout, Layouts, weight_of

import keras

_ATTRIBUTE = "tfpar_gradient_in_parts"


def divide_positions(model: keras.Model, layouts: Layouts, size: int, whole: Collection[int] = ()) -> int:
    """Divides the positions in blocks that allow it, and between consecutive such blocks in the model's graph.

    Args:
      model: A built Keras model.
      layouts: The result of `find_layout`; this function adds or replaces the layouts of the blocks and their layers.
      size: Number of devices on the model axis.
      whole: Identities of tensors of the graph that must have all positions, because they leave the devices.

    Returns:
      The number of these blocks.

    Raises:
      ConfigError: There is no such block, or the positions cannot be divided equally.
    """
    blocks = [
        layer
        for layer in keras_internals.all_layers(model)
        if getattr(layer, "divides_positions", False) and _is_divided(layer, layouts)
    ]
    if not blocks:
        raise ConfigError(
            f"--sequence_parallel: model {model.name!r} has no divided block that allows it, as tfpar's "
            "TransformerBlock does (divides_positions). keras-hub's decoders do not allow it: they build masks from "
            "the number of positions in their input. Leave it out."
        )
    edges = _edges(model, blocks, size, whole)
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
    """Whether the layers of a block are divided as the block declares."""
    ways = {id(inner): way.partition(":")[0] for inner, way in block.tensor_layout().items()}
    return all(key in layouts and layouts[key][1].way == way for key, way in ways.items())


def has_gradient_in_parts(variable: keras.Variable) -> bool:
    """Whether each device computes only a part of the gradient of this whole weight."""
    return bool(vars(variable).get(_ATTRIBUTE))


def mark_gradients_in_parts(layouts: Layouts) -> None:
    """Marks the whole weights of whose gradients each device computes a part: factors of adapters, biases of experts,
    and weights that all heads of attention share."""
    factors = [weight_of(layer, name) for layer, layout in layouts.values() for name in layout.in_parts]
    for variable in (*factors, *weights_of_all_heads(layouts)):
        vars(variable)[_ATTRIBUTE] = True


def _mark_gradients(block: keras.layers.Layer, layouts: Layouts) -> None:
    divided = {id(weight_of(layer, name)) for layer, layout in layouts.values() for name in layout.splits}
    for variable in block.variables:
        if id(variable) not in divided:
            vars(variable)[_ATTRIBUTE] = True


def _edges(
    model: keras.Model, blocks: list[keras.layers.Layer], size: int, whole: Collection[int]
) -> dict[int, tuple[bool, bool]]:
    """Returns, for each block, whether its input has all positions and whether its output must have them."""
    graph = keras_calls.graph_of(model)
    nodes = [] if graph is None else keras_calls.graph_nodes(graph)
    wanted = {*whole, *(map(id, graph.outputs) if graph is not None else ())}
    own: dict[int, Any] = {}
    calls = [] if graph is None else keras_calls.calls_within(graph)
    for block in blocks:
        own_calls = [node for node in nodes if node.operation is block]
        if len(own_calls) == 1 == sum(node.operation is block for node in calls):
            own[id(block)] = own_calls[0]
            _check_positions(block, own_calls[0].input_tensors[0].shape[1], size)

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
            f"--sequence_parallel: {block.path or block.name} has {positions} positions, which {size} devices cannot "
            "divide into equal parts. Use another --mesh or sequence length, or leave it out."
        )

"""Activations computed again in the backward pass instead of being kept (Chen et al. 2016, arXiv:1604.06174).

A block is a layer, or a segment of a functional model's graph. In the forward pass only its inputs and outputs are
kept; the backward pass calls it again, with the same values of every variable, so that dropout draws the same numbers
and batch statistics are those of the forward pass, and takes its gradient there. A step then costs about one more
forward pass of its blocks, and its memory holds the activations of one block at a time.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.models.normalization import uses_synchronized_statistics
from tfpar.optim import keras_calls, keras_compile, keras_internals
from tfpar.training.model.recompute_block import in_stateless_call, recomputed, recomputing_call

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)

NONE = "none"
_MARK = "tfpar_recomputed"
BLOCKS = "blocks"


def recompute_activations(model: keras.Model, where: str, *, announced: bool = False) -> list[str]:
    """Makes a model recompute activations whenever it is called on tensors in a `keras.StatelessScope`.

    A later call for the same model replaces an earlier one. Outside of such scopes (eager calls, `predict`, saving) the
    model does not change.

    Args:
      model: A built Keras model.
      where: `none`; `blocks`, the layers that consist of layers, such as those of a transformer, or for a functional
        model whose weights are mostly outside such layers, segments of its graph, about as many as the square root of
        its layers; or a regular expression, searched in the paths of layers.
      announced: Whether to log the names of the blocks.

    Returns:
      Names of the blocks, in the order of the model's layers. Empty for `none`.

    Raises:
      ConfigError: There is no such block.
    """
    every = keras_internals.all_layers(model)
    keras_calls.restore_calls(model, every)
    for layer in every:
        vars(layer).pop(_MARK, None)
    if where == NONE:
        return []
    if uses_synchronized_statistics(model):
        raise ConfigError(
            f"--recompute={where}: the model synchronises batch statistics between replicas in its forward pass, which "
            "the backward pass cannot repeat. Use --recompute=none, or a model without synchronised normalisation."
        )
    layers = _blocks(model) if where == BLOCKS else _matching_layers(model, where)
    for layer in layers:
        _make_block(model, layer)
    names = [layer.name for layer in layers] or _recompute_stretches(model)
    if announced:
        _log.info("recompute: the backward pass calls %d blocks again: %s", len(names), _shortened(names))
    return names


def recompute_layers(model: keras.Model, layers: Sequence[keras.layers.Layer]) -> None:
    """Makes more layers blocks, in addition to those of `recompute_activations`, unless they are inside one of
    these."""
    blocks = [layer for layer in keras_internals.all_layers(model) if vars(layer).get(_MARK)]
    inside = {id(inner) for block in blocks for inner in keras_internals.all_layers(block)}
    for layer in layers:
        if id(layer) not in inside:
            _make_block(model, layer)


def _make_block(model: keras.Model, layer: keras.layers.Layer) -> None:
    """Makes a layer a block. Its call may have been replaced for another reason, too."""
    keras_calls.replace_call(layer, functools.partial(recomputing_call, model))
    vars(layer)[_MARK] = True


def _shortened(names: Sequence[str], most: int = 6) -> str:
    return ", ".join([*names[:most], "..."] if len(names) > most else names)


def composite_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The outermost layers that consist of several layers with weights, also inside models within the model."""
    found = []
    for layer in _children(model):
        if isinstance(layer, keras.Model):
            found += composite_layers(layer)
        elif sum(bool(_own_weights(inner)) for inner in _inner_layers(layer)) > 1:
            found.append(layer)
    return found


def _blocks(model: keras.Model) -> list[keras.layers.Layer]:
    """The composite layers, unless the model is a graph and they are its smaller part, such as its attention."""
    layers = composite_layers(model)
    every = keras_internals.all_layers(model)
    embedded = sum(layer.count_params() for layer in every if isinstance(layer, keras.layers.Embedding))
    inside = sum(layer.count_params() for layer in layers)
    is_graph = keras_calls.graph_of(model) is not None
    return [] if is_graph and 2 * inside < model.count_params() - embedded else layers


def check_pattern(where: str) -> re.Pattern[str]:
    """The value of `--recompute` as a regular expression; `none` and `blocks` are valid expressions too.

    Raises:
      ConfigError: It is not a regular expression.
    """
    try:
        return re.compile(where)
    except re.error as error:
        message = f"--recompute={where!r} is neither none, blocks nor a regular expression: {error}."
        raise ConfigError(message) from None


def _matching_layers(model: keras.Model, pattern: str) -> list[keras.layers.Layer]:
    """The outermost layers with weights in whose path the pattern is found."""
    expression = check_pattern(pattern)

    def matching(layers: Sequence[keras.layers.Layer]) -> list[keras.layers.Layer]:
        found = []
        for layer in layers:
            if layer.weights and expression.search(_path(layer)):
                found.append(layer)
            else:
                found += matching(_children(layer))
        return found

    found = matching(_children(model))
    if not found:
        names = _shortened(sorted(_path(layer) for layer in _children(model) if layer.weights), most=12)
        raise ConfigError(f"--recompute={pattern!r} matches no layer with weights. The layers of this model: {names}.")
    return found


def _children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    return list(keras_internals.all_layers(layer, include_self=False, recursive=False))


def _inner_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    return keras_internals.all_layers(layer, include_self=False)


def _own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    return keras_internals.weights_made_to_learn(layer)


def _path(layer: keras.layers.Layer) -> str:
    return layer.path or layer.name


# Segments of a graph


def _recompute_stretches(model: keras.Model) -> list[str]:
    """Cuts the graph of a functional model where the fewest tensors cross."""
    graph = keras_calls.graph_of(model)
    stretches = [] if graph is None else cut(keras_calls.graph_nodes(graph))
    if graph is None or len(stretches) < 2:
        raise ConfigError(
            f"--recompute=blocks: the model {model.name!r} has no layers that consist of layers, and no graph that "
            "could be cut. Name layers with --recompute=REGEX."
        )
    keras_calls.replace_graph_run(graph, functools.partial(_run_in_stretches, model, stretches))
    return [f"{stretch[0].operation.name}..{stretch[-1].operation.name}" for stretch in stretches[:-1]]


def cut(nodes: Sequence[Any]) -> list[list[Any]]:
    """Cuts nodes into consecutive segments of about equal activations, with a single tensor at each cut.

    With n layers and s segments, about s boundaries and the activations of n/s layers are kept: least for s = sqrt(n).

    Args:
      nodes: The nodes of a functional model, in the order in which they run.
    """
    sizes = [sum(math.prod(size or 1 for size in tensor.shape) for tensor in node.outputs) for node in nodes]
    weighted = sum(bool(getattr(node.operation, "weights", None)) for node in nodes)
    target = sum(sizes) / max(round(math.sqrt(weighted)), 1)
    stretches: list[list[Any]] = [[]]
    total = 0
    for index, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
        stretches[-1].append(node)
        total += size
        if total >= target and index + 1 < len(nodes) and len(_crossing(nodes, index)) == 1:
            stretches.append([])
            total = 0
    return stretches


def _crossing(nodes: Sequence[Any], index: int) -> set[int]:
    """Tensors that are computed up to a node and read after it."""
    made = {id(tensor) for node in nodes[: index + 1] for tensor in node.outputs}
    return made & {id(tensor) for node in nodes[index + 1 :] for tensor in node.input_tensors}


def _run_in_stretches(
    model: keras.Model,
    stretches: list[list[Any]],
    graph: Any,
    plain: Callable[..., Any],
    /,
    inputs: Any,
    **options: Any,
) -> Any:
    """Replaces `keras.Function._run_through_graph`."""
    operation_fn = options.get("operation_fn")
    if operation_fn is None or options.get("call_fn") is not None or not in_stateless_call(inputs):
        return plain(inputs, **options)
    known = {id(symbol): value for symbol, value in zip(graph.inputs, tf.nest.flatten(inputs), strict=True)}
    wanted = {id(symbol) for symbol in graph.outputs}
    for place, stretch in enumerate(stretches):
        later = [node for following in stretches[place + 1 :] for node in following]
        read = wanted | {id(symbol) for node in later for symbol in node.input_tensors}
        made = {id(symbol): None for node in stretch for symbol in node.outputs if id(symbol) in read}
        needed = [id(symbol) for node in stretch for symbol in node.input_tensors]
        given = {key: known[key] for key in needed if key in known}

        def run(values: list[Any], stretch: Any = stretch, given: Any = given, made: Any = made) -> list[Any]:
            table = dict(zip(given, values, strict=True))
            for node in stretch:
                args, kwargs = node.arguments.fill_in(table)
                outputs = operation_fn(node.operation)(*args, **kwargs)
                table.update(zip(map(id, node.outputs), tf.nest.flatten(outputs), strict=False))
            return [table[key] for key in made]

        is_last = place == len(stretches) - 1  # its backward pass comes first: nothing is gained
        weights = [variable for node in stretch for variable in getattr(node.operation, "variables", ())]
        values = list(given.values())
        results = run(values) if is_last else recomputed(model, weights, run, (values,), {}, stretch[0].operation.name)
        known.update(zip(made, results, strict=True))
    outputs = [known[id(symbol)] for symbol in graph.outputs]
    return keras.tree.pack_sequence_as(keras_compile.symbolic_outputs(graph), outputs)

"""Calls of divided layers: each device computes with its part of the weights; sums and gathers join the results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.division import Split
from tfpar.parallel.model_axis import Place, current_place
from tfpar.parallel.split import model_split_of
from tfpar.parallel.tensor.attention import ATTENDED, MASK, mask_of_own_heads, with_own_heads
from tfpar.parallel.tensor.divided_logits import DividedLogits, returned
from tfpar.parallel.tensor.experts import call_experts
from tfpar.parallel.tensor.obstacles import check_call, reading_parts
from tfpar.parallel.tensor.ways import (
    COLUMN,
    EXPERTS,
    GATHER,
    HEADS,
    OWN_NUMBERS,
    POSITIONS,
    ROW,
    VOCABULARY,
    Layouts,
    weight_of,
)

import keras
import tensorflow as tf
from keras import ops

# Turns a device's part of the outputs into the layer's result.
Finish = Callable[[DividedLogits], Any]
_SHIFT = 0x9E3779B1  # an odd number far from small ones
_SCORES = 4  # number of dims of the scores of attention over one axis: example, head, query, key


def divide_calls(layouts: Layouts, heads: Collection[int] = ()) -> None:
    """Makes layers compute with their parts whenever the program of one device is traced (see `ModelAxis.on`).

    Args:
      layouts: The result of `find_layout`.
      heads: `id`s of layers whose outputs may stay divided, see `heads_of`.
    """
    inside_attention = {
        id(child)
        for layer, layout in layouts.values()
        if layout.way == HEADS
        for child in keras_internals.all_layers(layer, include_self=False)
    }
    for layer, layout in layouts.values():
        call = _CALLS[layout.way]
        if layout.divides_positions:
            call = _CALLS_OF_POSITIONS[layout.way]
        elif layout.way == POSITIONS:
            call = functools.partial(_positions, layout.edges)
        elif layout.way in (GATHER, VOCABULARY):
            call = functools.partial(call, returned if id(layer) in heads else DividedLogits.gathered)
        if layout.way == COLUMN and id(layer) in inside_attention:
            continue  # its inputs entered with those of the attention layer: one sum instead of three
        if layout.way == ROW:
            layer.input_spec = None  # Dense checks the whole width
        keras_calls.replace_call(layer, _where_divided(call))


def heads_of(model: keras.Model) -> set[int]:
    """Returns the `id`s of the layers whose outputs are outputs of the model and have no other use.

    There are none if the model overrides `call`, or recomputes activations at its end.
    """
    graph = keras_calls.graph_of(model)
    return set() if graph is None else _heads_of(graph, keras_calls.calls_within(graph), graph.outputs)


def _heads_of(graph: Any, calls: Sequence[Any], wanted: Sequence[Any]) -> set[int]:
    """See `heads_of`.

    Args:
      graph: The functional model, or one that it calls.
      calls: All calls, see `keras_calls.calls_within`.
      wanted: Those outputs of the graph that are outputs of the whole model.
    """
    if keras_calls.runs_graph_otherwise(graph):
        return set()
    nodes = keras_calls.graph_nodes(graph)
    read = {id(tensor) for node in nodes for tensor in node.input_tensors}
    heads = set()
    for tensor in wanted:
        made = [node for node in nodes if any(output is tensor for output in node.outputs)]
        if len(made) != 1 or id(tensor) in read or sum(output is tensor for output in graph.outputs) > 1:
            continue
        layer = made[0].operation
        # An embedding table is also called with tokens.
        uses = [node for node in calls if node.operation is layer and (not _has_table(layer) or _reverses(node))]
        if len(uses) != 1 or keras_calls.is_called_otherwise(layer):
            continue
        if isinstance(layer, keras.Model):
            inner = keras_calls.graph_of(layer)
            if inner is not None:
                pairs = zip(made[0].outputs, inner.outputs, strict=True)
                heads |= _heads_of(inner, calls, [own for output, own in pairs if output is tensor])
        elif _is_linear(layer):
            heads.add(id(layer))
    return heads


def _is_linear(layer: keras.layers.Layer) -> bool:
    """Whether the layer never needs all of its outputs: it has no activation, such as softmax, and no regularizer of
    it.
    """
    activation = getattr(layer, "activation", None)
    return activation in (None, keras.activations.linear) and layer.activity_regularizer is None


def _has_table(layer: keras.layers.Layer) -> bool:
    return hasattr(layer, "embeddings")


def _reverses(node: Any) -> bool:
    arguments = node.arguments
    return bool(arguments.kwargs.get("reverse") or arguments.args[1:2] == (True,))


def _where_divided(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(layer: keras.layers.Layer, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        place = current_place()
        if place is None:
            return plain(*args, **kwargs)
        check_call(layer)
        with reading_parts(layer.variables):  # those of attention, too, whose projections have no such call
            return call(place, layer, plain, *args, **kwargs)

    return run


def _column(place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    del layer
    return plain(place.enter(inputs), *args, **kwargs)


def _row(place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *_: Any, **__: Any) -> Any:
    del plain
    return _activated(layer, _biased(layer, place.leave(_product(layer, inputs))))


def _gathered(
    finish: Finish, place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *_: Any, **__: Any
) -> Any:
    del plain
    outputs = _biased(layer, _product(layer, place.enter(inputs)))
    return _activated(layer, finish(_divided(place, outputs, weight_of(layer, "kernel"))))


def _divided(place: Place, outputs: Any, variable: keras.Variable) -> DividedLogits:
    split = model_split_of(variable)
    padding = split.padding if split else 0
    return DividedLogits(place, outputs, place.size * outputs.shape[-1] - padding)


def _column_of_positions(
    place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    del layer
    return plain(place.enter_positions(inputs), *args, **kwargs)


def _row_of_positions(place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *_: Any, **__: Any) -> Any:
    del plain
    return _activated(layer, _biased(layer, place.leave_positions(_product(layer, inputs))))


def _positions(
    edges: tuple[bool, bool],
    place: Place,
    layer: Any,
    plain: Callable[..., Any],
    inputs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a block in which each device holds a part of the positions; its input and output may have all positions."""
    gets_all, returns_all = edges
    del layer
    outputs = plain(place.part_positions(inputs) if gets_all else inputs, *args, **kwargs)
    return place.gather_positions(outputs) if returns_all else outputs


def _heads(place: Place, layer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(plain).bind(*args, **kwargs)
    entered: dict[int, tuple[Any, Any]] = {}

    def enter(given: Any) -> Any:
        if given is None:
            return None
        if id(given) not in entered:  # self-attention: one sum in the backward pass
            copied = keras_internals.set_mask(place.enter(given), keras_internals.mask_of(given))
            entered[id(given)] = given, copied
        return entered[id(given)][1]

    for name in ATTENDED:
        if name in bound.arguments:  # with cross-attention, T5Gemma's `inputs` are two tensors
            bound.arguments[name] = keras.tree.map_structure(enter, bound.arguments[name])
    if bound.arguments.get(MASK) is not None:
        bound.arguments[MASK] = mask_of_own_heads(layer, bound.arguments[MASK], place.rank, place.size)
    with with_own_heads(layer, place.size):
        outputs = plain(*bound.args, **bound.kwargs)
    for given, copied in entered.values():
        if keras_internals.mask_of(copied) is None:  # Keras' attention removes the masks of its arguments
            keras_calls.remove_mask(given)
    return _with_all_scores(place, layer, *outputs) if bound.arguments.get("return_attention_scores") else outputs


def _with_all_scores(place: Place, layer: Any, outputs: Any, scores: Any) -> tuple[Any, Any]:
    """The outputs of attention, and the scores of all heads."""
    if scores.shape.rank != _SCORES:
        raise ConfigError(
            f"--mesh: {layer.path} returns its scores, of shape {scores.shape}, whose heads are divided over devices. "
            f"Keep it whole, with layout={{{layer.path!r}: 'whole'}}."
        )
    return outputs, place.join(scores, Split(1, place.size))


def _vocabulary(
    finish: Finish, place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("reverse") or (args and args[0] is True):  # logits of a tied head
        outputs = plain(place.enter(inputs), *args, **kwargs)
        return finish(_divided(place, outputs, weight_of(layer, "embeddings")))
    table = weight_of(layer, "embeddings")
    rows, split = table.shape[0], model_split_of(table)
    length = place.size * rows - (split.padding if split else 0)
    tokens = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    tokens = tf.where(tokens < 0, tokens + length, tokens)  # Keras counts them from the end of the table
    own = tokens - place.rank * rows
    is_token = (tokens >= 0) & (tokens < length)
    is_own = is_token & (own >= 0) & (own < rows)
    # On CPUs, all devices refuse what is no token, as one device does. The layer adds `rows` to negative numbers.
    no_token = tf.where(tokens < 0, tokens - rows, tokens)
    readable = tf.where(is_own, own, tf.where(is_token, tf.zeros_like(own), no_token))
    with tf.name_scope(f"part_of_{length}_tokens"):  # for the error message, which has the length of the part
        vectors = plain(readable, *args, **kwargs)
    found = place.leave(tf.where(is_own[..., tf.newaxis], vectors, tf.zeros([], vectors.dtype)))
    # ReversibleEmbedding (Keras 3.15) computes the mask within its call.
    return found if keras_internals.mask_of(vectors) is None else keras_internals.set_mask(found, inputs != 0)


def _own_numbers(place: Place, layer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draws with a seed of this device, and leaves the generator in the state that all devices share."""
    scope, generator = keras_calls.innermost_scope(), getattr(layer, "seed_generator", None)
    if scope is None or generator is None:
        return plain(*args, **kwargs)
    state = generator.state
    shift = tf.cast(tf.constant([place.rank * _SHIFT % 2**31, 0], tf.int64), state.dtype)
    scope.add_update((state, scope.get_current_value(state) + shift))
    outputs = plain(*args, **kwargs)
    scope.add_update((state, scope.get_current_value(state) - shift))
    return outputs


_CALLS: dict[str, Callable[..., Any]] = {  # those of GATHER and VOCABULARY take `Finish` first
    COLUMN: _column,
    ROW: _row,
    GATHER: _gathered,
    HEADS: _heads,
    EXPERTS: call_experts,
    VOCABULARY: _vocabulary,
    OWN_NUMBERS: _own_numbers,
    POSITIONS: _positions,  # takes its edges first
}
_CALLS_OF_POSITIONS: dict[str, Callable[..., Any]] = {COLUMN: _column_of_positions, ROW: _row_of_positions}


# The three steps of Keras 3.15's Dense, EinsumDense and convolutions with the channels last.


def _product(layer: Any, inputs: Any) -> Any:
    if isinstance(layer, keras.layers.EinsumDense):
        return ops.einsum(layer.equation, inputs, layer.kernel)
    if not isinstance(layer, keras.layers.Dense):
        return _convolution(layer, inputs)
    return ops.matmul(inputs, layer.kernel)


def _convolution(layer: Any, inputs: Any) -> Any:
    padding = layer.padding
    if padding == "causal":  # `call` of Conv1D pads the inputs, `convolution_op` does not
        padding, before = "valid", layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
        inputs = ops.pad(inputs, [[0, 0], [before, 0], [0, 0]])
    return ops.conv(
        inputs,
        layer.kernel,
        strides=list(layer.strides),
        padding=padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def _biased(layer: Any, outputs: Any) -> Any:
    return outputs if layer.bias is None else ops.add(outputs, layer.bias)


def _activated(layer: Any, outputs: Any) -> Any:
    return outputs if layer.activation is None else layer.activation(outputs)

"""Calls of divided layers, each on its part of the weights, with what the devices of the model axis tell each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.model_axis import Place, current_place
from tfpar.parallel.tensor_layout import COLUMN, GATHER, HEADS, OWN_NUMBERS, ROW, VOCABULARY, Layouts

import keras
import tensorflow as tf
from keras import ops

_ATTENDED = ("query", "value", "key", "hidden_states")
_SHIFT = 0x9E3779B1  # an odd number far from small ones


def divide_calls(layouts: Layouts) -> None:
    """Makes layers compute with their parts wherever the program of one device is traced, see `ModelAxis.on`."""
    inside_attention = {
        id(child)
        for layer, layout in layouts.values()
        if layout.way == HEADS
        for child in keras_internals.all_layers(layer, include_self=False)
    }
    for layer, layout in layouts.values():
        call = _CALLS[layout.way]
        if layout.way == COLUMN and id(layer) in inside_attention:
            continue  # its inputs have entered with those of the attention layer: one sum in place of three
        if layout.way == ROW:
            layer.input_spec = None  # Dense wants the width of the whole
        keras_calls.replace_call(layer, _where_divided(call))


def _where_divided(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(layer: keras.layers.Layer, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        place = current_place()
        return plain(*args, **kwargs) if place is None else call(place, layer, plain, *args, **kwargs)

    return run


def _column(place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    del layer
    return plain(place.enter(inputs), *args, **kwargs)


def _row(place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *_: Any, **__: Any) -> Any:
    del plain
    return _activated(layer, _biased(layer, place.leave(_product(layer, inputs))))


def _gathered(place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *_: Any, **__: Any) -> Any:
    del plain
    return _activated(layer, place.gather(_biased(layer, _product(layer, place.enter(inputs)))))


def _heads(place: Place, layer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    del layer
    bound = inspect.signature(plain).bind(*args, **kwargs)
    entered: dict[int, Any] = {}
    for name in _ATTENDED:
        given = bound.arguments.get(name)
        if given is None:
            continue
        if id(given) not in entered:  # self-attention: one sum in the backward pass
            entered[id(given)] = keras_internals.set_mask(place.enter(given), keras_internals.mask_of(given))
        bound.arguments[name] = entered[id(given)]
    return plain(*bound.args, **bound.kwargs)


def _vocabulary(place: Place, layer: Any, plain: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("reverse") or (args and args[0] is True):  # logits of a tied head
        return place.gather(plain(place.enter(inputs), *args, **kwargs))
    rows = layer.embeddings.shape[0]
    tokens = tf.cast(inputs, tf.int32) - place.rank * rows
    own = (tokens >= 0) & (tokens < rows)
    vectors = plain(tf.where(own, tokens, 0), *args, **kwargs)
    return place.leave(tf.where(own[..., tf.newaxis], vectors, tf.zeros([], vectors.dtype)))


def _own_numbers(place: Place, layer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draws with a seed of this device, and leaves the state of the generator as all devices have it."""
    scope, generator = keras_calls.innermost_scope(), getattr(layer, "seed_generator", None)
    if scope is None or generator is None:
        return plain(*args, **kwargs)
    state = generator.state
    shift = tf.cast(tf.constant([place.rank * _SHIFT % 2**31, 0], tf.int64), state.dtype)
    scope.add_update((state, scope.get_current_value(state) + shift))
    outputs = plain(*args, **kwargs)
    scope.add_update((state, scope.get_current_value(state) - shift))
    return outputs


_CALLS: dict[str, Callable[..., Any]] = {
    COLUMN: _column,
    ROW: _row,
    GATHER: _gathered,
    HEADS: _heads,
    VOCABULARY: _vocabulary,
    OWN_NUMBERS: _own_numbers,
}


# The three steps of Keras 3.15's Dense, EinsumDense and convolutions with the channels last.


def _product(layer: Any, inputs: Any) -> Any:
    if isinstance(layer, keras.layers.EinsumDense):
        return ops.einsum(layer.equation, inputs, layer.kernel)
    if not isinstance(layer, keras.layers.Dense):
        return layer.convolution_op(inputs, layer.kernel)
    return ops.matmul(inputs, layer.kernel)


def _biased(layer: Any, outputs: Any) -> Any:
    return outputs if layer.bias is None else ops.add(outputs, layer.bias)


def _activated(layer: Any, outputs: Any) -> Any:
    return outputs if layer.activation is None else layer.activation(outputs)

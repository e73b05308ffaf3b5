"""Attention layers, which are recognised by the names of their projections, and how each device calls its heads.

The projections of Keras' and keras-hub's attention are EinsumDense layers, whose outputs have a dimension of heads.
Most attention reads the number of heads from its tensors; some, such as Gemma's, from attributes, see `with_own_heads`.
If all queries share one head of keys and values, its projections stay whole, and every device computes them.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from tfpar.optim import keras_internals
from tfpar.parallel.tensor.ways import COLUMN, HEADS, OWN_NUMBERS, ROW, Layouts, weight_of

import keras

_PROJECTIONS = ("query", "key", "value", "attention_output")
# Arguments of `call` that projections read: the gradient of each is the sum over the devices' heads.
ATTENDED = ("query", "value", "key", "hidden_states", "x", "inputs", "encoder_hidden_states", "rel_embeddings")
MASK = "attention_mask"  # of all heads, or of each, see `mask_of_own_heads`
# Arguments that are the same for all heads, and need no gradient.
_COMMON = (
    *("query_mask", "value_mask", "key_mask", "use_causal_mask", "position_ids", "rotary_embedding"),
    *("cache", "cache_update_index", "cache_update_mask", "return_attention_scores", "training"),
)
_MASK_OF_HEADS = 4  # number of dims of such a mask
# Attributes with a number of heads, or with the width that all heads have together.
_OF_ALL_HEADS = re.compile(r"_?(num_(\w+_)?heads|hidden_dim)")
# The number of queries' heads for each head of keys, which differs by device only where there is one head of keys.
_FOR_EACH_KEY = re.compile(r"_?num_(key_value_groups|repeats)")
_HEADS_OF_KEYS = ("num_key_value_heads", "_num_key_value_heads")


def ways_of_attention(layer: keras.layers.Layer) -> dict[keras.layers.Layer, str]:
    """Returns the ways of an attention layer's projections, divided by heads; empty if the layer is not attention.

    Keras and keras-hub build attention from projections with these names.
    """
    inner = _children(layer)
    children = {child.name: child for child in inner}
    if not all(isinstance(children.get(name), keras.layers.EinsumDense) for name in _PROJECTIONS):
        return {}
    divided = ("query", "gate") if _has_one_head_of_keys(layer) else (*_PROJECTIONS[:-1], "gate")
    projections = {children[name]: COLUMN for name in divided if name in children}
    masked = {child: OWN_NUMBERS for child in inner if isinstance(child, keras.layers.Dropout)}
    return {**projections, children[_PROJECTIONS[-1]]: ROW, layer: HEADS, **masked}


def obstacle_of(layer: keras.layers.Layer) -> str:
    """Why an attention layer cannot be divided by heads, however many it has; empty if nothing is in the way.

    Args:
      layer: A layer for which `ways_of_attention` has ways.
    """
    if own := [weight.name for weight in keras_internals.weights_made_to_learn(layer)]:
        return f"weights beside its projections ({', '.join(own)})"
    unknown = [name for name in inspect.signature(layer.call).parameters if name not in (*ATTENDED, MASK, *_COMMON)]
    if unknown:
        return f"inputs that may belong to single heads ({', '.join(unknown)})"
    others = [child for child in _children(layer) if child.name not in (*_PROJECTIONS, "gate")]
    wide = [child.name for child in others if not _is_same_for_all_heads(child, layer)]
    return f"layers beside its projections ({', '.join(wide)})" if wide else ""


def weights_of_all_heads(layouts: Layouts) -> list[keras.Variable]:
    """The weights that all heads of divided attention share, such as those of norms of queries and keys, or of the only
    head of keys and values."""
    attention = [layer for layer, layout in layouts.values() if layout.way == HEADS]
    others = [child for layer in attention for child in _children(layer) if id(child) not in layouts]
    return [weight for child in others for weight in child.trainable_variables]


@contextlib.contextmanager
def with_own_heads(layer: keras.layers.Layer, devices: int) -> Iterator[None]:
    """In this context an attention layer's attributes say how many heads one device has.

    No other thread reads them meanwhile: `tf.distribute` traces the programs of its devices one after the other, and
    switches between them only at calls across replicas.

    Args:
      layer: The layer.
      devices: Number of devices on the model axis.
    """
    attributes = vars(layer)  # past Keras' `__setattr__`
    names = (_OF_ALL_HEADS, _FOR_EACH_KEY) if _has_one_head_of_keys(layer) else (_OF_ALL_HEADS,)
    whole = {
        name: value
        for name, value in attributes.items()
        if type(value) is int and any(each.fullmatch(name) for each in names) and value % devices == 0
    }
    # Gemma scales queries by `hidden_dim // num_query_heads`, which stays as it is.
    attributes.update({name: value // devices for name, value in whole.items()})
    try:
        yield
    finally:
        attributes.update(whole)


def mask_of_own_heads(layer: keras.layers.Layer, mask: Any, rank: int, devices: int) -> Any:
    """Returns the part of a mask for the heads of one device.

    Args:
      layer: The attention layer, with the weights of its own heads.
      mask: `[m, heads, T, S]` with a mask for each head, for queries `[m, T, D]`; any other mask is for all heads.
      rank: Rank of the device on the model axis.
      devices: Number of devices on the model axis.
    """
    query = next((child for child in _children(layer) if child.name == _PROJECTIONS[0]), None)
    over_one_axis = query is not None and len(query.equation.partition(",")[0]) == _MASK_OF_HEADS - 1
    if query is None or not over_one_axis or len(mask.shape) != _MASK_OF_HEADS:
        return mask
    own = weight_of(query, "kernel").shape[1]
    return mask[:, rank * own : (rank + 1) * own] if mask.shape[1] == own * devices else mask


def _has_one_head_of_keys(layer: keras.layers.Layer) -> bool:
    return any(vars(layer).get(name) == 1 for name in _HEADS_OF_KEYS)


def _is_same_for_all_heads(child: keras.layers.Layer, attention: keras.layers.Layer) -> bool:
    """Whether a layer has no weights, or only such as the norm of a head's queries or keys has."""
    projections = [layer for layer in _children(attention) if layer.name in _PROJECTIONS[:-1]]
    of_a_head = {(weight_of(layer, "kernel").shape[-1],) for layer in projections}
    weights = [weight for weight in child.weights if not keras_internals.is_seed_state(weight)]
    return all(tuple(weight.shape) in of_a_head for weight in weights)


def _children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    return keras_internals.all_layers(layer, include_self=False, recursive=False)

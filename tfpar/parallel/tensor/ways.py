"""The ways in which a layer is divided over the model axis (Shoeybi et al. 2019, arXiv:1909.08053).

| way | layers | what a device has | what is communicated |
|---|---|---|---|
| `column` | Dense, EinsumDense | some outputs, which the next layer takes divided | gradient of the input, summed |
| `row` | Dense, EinsumDense | some inputs, which the previous layer left divided | output, summed |
| `gather` | Dense, Conv1D to 3D | some outputs, or channels | outputs, gathered; gradient of the input, summed |
| `heads` | attention | some heads | gradient of the inputs, summed |
| `experts` | keras-hub's experts | some hidden units of every expert | sum of experts, summed; gradients, summed |
| `vocabulary` | Embedding | the vectors of some tokens | vectors, summed; logits of a tied head, gathered |
| `whole` | all others | all | nothing |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tfpar.parallel.division import Split
from tfpar.parallel.tensor.experts import splits_of_experts

import keras
import numpy as np
import tensorflow as tf

COLUMN, ROW, GATHER, HEADS, EXPERTS, VOCABULARY, WHOLE = WAYS = (
    *("column", "row", "gather", "heads", "experts", "vocabulary", "whole"),
)
OWN_NUMBERS = "own_numbers"  # dropout on divided values: devices must not draw the same mask for different units
POSITIONS = "positions"  # a block, see `positions.py`

# Keras' activations that combine several outputs; all others act on each output by itself.
_OVER_OUTPUTS = ("softmax", "log_softmax", "sparsemax", "glu")
_OF_KERAS = {id(function): name for name, function in vars(keras.activations).items() if callable(function)}
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """The division of one layer.

    Attributes:
      way: One of `WAYS`.
      splits: The division of the layer's own variables, by name; variables that are not listed are whole.
      divides_positions: Whether the input of a column layer, or the output of a row layer, has divided positions.
      edges: For a block with divided positions, whether its input has all of them, and whether its output must.
      in_parts: Names of whole variables of whose gradient each device computes a part.
    """

    way: str
    splits: Mapping[str, Split] = dataclasses.field(default_factory=dict)
    divides_positions: bool = False
    edges: tuple[bool, bool] = (True, True)
    in_parts: tuple[str, ...] = ()


Layouts = dict[int, tuple[keras.layers.Layer, LayerLayout]]


def parse_way(text: str) -> tuple[str, int, int]:
    """Returns the parts of a way such as `column:3x4`: kind, blocks (1 by default), heads per block (0 by default)."""
    kind, _, groups = text.partition(":")
    groups, _, heads = groups.partition("x")
    return kind, int(groups or 1), int(heads or 0)


def layout_of(layer: keras.layers.Layer, way: str, size: int) -> LayerLayout | None:
    """Returns the layout of a layer; None if it cannot be divided in this way into equal parts.

    Args:
      layer: A built layer.
      way: `column:3` divides each of three blocks; `column:3x4` also does not cut through the four heads of each block.
      size: Number of devices on the model axis.
    """
    way, groups, heads = parse_way(way)
    if heads % size:
        return None
    if way in (HEADS, OWN_NUMBERS):
        return LayerLayout(way)
    if way == VOCABULARY:
        if not hasattr(layer, "embeddings") or _is_special(layer):
            return None
        rows = weight_of(layer, "embeddings").shape[0]
        if not _can_pad(rows, size):
            return None
        tables = {"embeddings": Split.padded(0, size, rows)}
        if getattr(layer, "reverse_embeddings", None) is not None:  # a head with its own table
            tables["reverse_embeddings"] = Split.padded(1, size, rows)
        return _with_adapters(layer, LayerLayout(way, tables))
    if way == EXPERTS:
        found = splits_of_experts(layer, size)
        return None if found is None else LayerLayout(way, found[0], in_parts=found[1])
    makers = {COLUMN: _column_splits, GATHER: _gather_splits, ROW: _row_splits}
    splits = makers[way](layer, size, groups) if way in makers else None
    return None if splits is None else _with_adapters(layer, LayerLayout(way, splits))


def weight_of(layer: keras.layers.Layer, name: str) -> keras.Variable:
    """Returns a variable of a layer: that of the attribute with this name, which is the sum with the adapters if the
    layer has some, or else of the variable with this name."""
    if not getattr(layer, "lora_enabled", False) and hasattr(layer, name):
        return getattr(layer, name)
    return next(weight for weight in layer.weights if weight.name == name)


def _with_adapters(layer: keras.layers.Layer, layout: LayerLayout) -> LayerLayout:
    """Returns the layout with the division of a layer's adapters (LoRA).

    One of the factors has the dimension along which the weight is divided. Each device multiplies its part of it with
    the other one, which is whole, and so gets a part of the gradient of that.
    """
    names = [name for name in layout.splits if hasattr(layer, f"lora_{name}_a")]
    if not getattr(layer, "lora_enabled", False) or not names:
        return layout
    [name] = names
    split, last = layout.splits[name], len(weight_of(layer, name).shape) - 1
    first, second = f"lora_{name}_a", f"lora_{name}_b"
    if split.axis == last:
        return dataclasses.replace(
            layout, splits={**layout.splits, second: dataclasses.replace(split, axis=1)}, in_parts=(first,)
        )
    return dataclasses.replace(layout, splits={**layout.splits, first: split}, in_parts=(second,))


def _column_splits(layer: keras.layers.Layer, size: int, groups: int = 1) -> dict[str, Split] | None:
    # A regularizer of outputs would see a part of them.
    if not _is_linear(layer) or layer.activity_regularizer is not None or not acts_on_each_output(layer.activation):
        return None
    return _output_splits(layer, size, groups)


def _gather_splits(layer: keras.layers.Layer, size: int, groups: int = 1) -> dict[str, Split] | None:
    del groups  # gathered parts must be in order
    if not can_gather(layer):
        return None
    kernel = weight_of(layer, "kernel").shape
    outputs = kernel[-1]
    if not _can_pad(outputs, size):
        return None
    splits = {"kernel": Split.padded(len(kernel) - 1, size, outputs)}
    return splits if layer.bias is None else {**splits, "bias": Split.padded(0, size, outputs)}


def _can_pad(length: int, size: int) -> bool:
    """Whether padding the last part makes all parts equal, without a part that is only padding."""
    return -length % size < -(-length // size)


def can_gather(layer: keras.layers.Layer) -> bool:
    """Whether the last dimension of the layer's outputs is that of its kernel."""
    if type(layer) in _CONVOLUTIONS:
        return layer.groups == 1 and layer.data_format == "channels_last" and not _is_special(layer)
    return type(layer) is keras.layers.Dense and _is_linear(layer)


def _output_splits(layer: keras.layers.Layer, size: int, groups: int) -> dict[str, Split] | None:
    """Returns splits of kernel and bias along the first output dimension that is not an input dimension."""
    shape = weight_of(layer, "kernel").shape
    axis, bias_axis = len(shape) - 1, 0
    if isinstance(layer, keras.layers.EinsumDense):
        inputs, kernel, outputs = _equation(layer)
        own = [label for label in kernel if label in outputs and label not in inputs]
        if not own:
            return None
        axis = kernel.index(own[0])
        bias_axis = (layer.bias_axes or own[0]).find(own[0])
        if bias_axis < 0:
            return None
    splits = {"kernel": Split(axis, size, groups)}
    if layer.bias is not None:
        splits["bias"] = Split(bias_axis, size, groups)
    fits = splits["kernel"].divides(shape)
    return splits if fits and ("bias" not in splits or splits["bias"].divides(layer.bias.shape)) else None


def _row_splits(layer: keras.layers.Layer, size: int, groups: int = 1) -> dict[str, Split] | None:
    if not _is_linear(layer):
        return None
    axis = 0
    if isinstance(layer, keras.layers.EinsumDense):
        inputs, kernel, outputs = _equation(layer)
        summed = [label for label in kernel if label in inputs and label not in outputs]
        if not summed:
            return None
        axis = kernel.index(summed[0])
    split = Split(axis, size, groups)
    return {"kernel": split} if split.divides(weight_of(layer, "kernel").shape) else None


def _is_linear(layer: keras.layers.Layer) -> bool:
    return type(layer) in (keras.layers.Dense, keras.layers.EinsumDense) and not _is_special(layer)


def _is_special(layer: keras.layers.Layer) -> bool:
    """Whether a layer has quantised weights, or a constraint on a whole weight."""
    constrained = any(weight.constraint is not None for weight in layer.weights)
    return bool(getattr(layer, "quantization_mode", None)) or constrained


def acts_on_each_output(activation: Callable[[Any], Any] | None) -> bool:
    """Whether an activation computes each output from its own input alone: known of Keras' functions; others, such as
    a lambda or a layer, are tried on numbers. The weights of a layer stay whole, so none acts on each output alone."""
    if activation is None or id(activation) in _OF_KERAS:
        return activation is None or _OF_KERAS[id(activation)] not in _OVER_OUTPUTS
    if isinstance(activation, keras.layers.Layer) and activation.variables:
        return False
    inputs = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            whole, *parts = (
                tf.cast(activation(tf.constant(inputs[:, units])), tf.float32).numpy()
                for units in (slice(None), slice(3), slice(3, None))
            )
    except Exception:  # of a function of the user's, or of a layer with a weight for each output
        return False
    joined = np.concatenate(parts, axis=-1)
    return whole.shape == inputs.shape == joined.shape and np.allclose(whole, joined, rtol=1e-2, atol=1e-3)


def _equation(layer: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Returns the labels of input, kernel and output."""
    operands, outputs = layer.equation.replace("...", "").split("->")
    inputs, kernel = operands.split(",")
    return inputs.strip(), kernel.strip(), outputs.strip()

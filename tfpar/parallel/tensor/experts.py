"""Experts of keras-hub's mixtures, which are divided by hidden units: each device computes a part of every expert.

These layers have the weights of all experts in tensors, and compute every expert for every token; the block around them
multiplies each expert's output by its weight for the token, and adds up the experts. The sum over devices comes after
that over experts: it is of `[T, h]` instead of `[E, T, h]`.

Shape suffixes: E experts, T tokens, h width, m hidden units.
"""

from __future__ import annotations

from typing import Any

from tfpar.optim import keras_internals
from tfpar.parallel.division import Split
from tfpar.parallel.model_axis import Place

import keras
import tensorflow as tf
from keras import ops

# The dimension of hidden units, by the name of a weight; first those of Mixtral and Qwen, then those of GPT-OSS.
_UNITS = {
    "expert_feedforward_gate_dense": 2,  # [E, h, m]; of Qwen [E, h, 2 m]: all gates, then all units
    "expert_feedforward_intermediate_dense": 2,
    "expert_feedforward_output_dense": 1,
    "gate_up_proj": 2,  # [E, h, 2 m]: gates and units in turn
    "gate_up_proj_bias": 1,
    "down_proj": 1,
}
_OUTPUTS = ("expert_feedforward_output_dense", "down_proj")
_IN_TURN = ("gate_up_proj", "gate_up_proj_bias")
_BIAS = "down_proj_bias"  # [E, h], of the outputs


def is_of_keras_hub(layer: keras.layers.Layer) -> bool:
    """Whether the class of a layer, which is no model, is keras-hub's own."""
    return type(layer).__module__.partition(".")[0] == "keras_hub" and not isinstance(layer, keras.Model)


def experts_in(block: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the layers of experts whose outputs a layer of keras-hub weighs and adds up."""
    inner = keras_internals.all_layers(block, include_self=False, recursive=False) if is_of_keras_hub(block) else []
    return [layer for layer in inner if units_of(layer)]


def routers_in(block: keras.layers.Layer, experts: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns the Dense layers of a block with at most one output for each expert, such as the router.

    To gather these would cost as much as the experts themselves: the sum of the gradient of the block's inputs.
    """
    number = experts.weights[0].shape[0]
    dense = [layer for layer in keras_internals.all_layers(block) if type(layer) is keras.layers.Dense]
    return [layer for layer in dense if layer.units <= number]


def units_of(layer: keras.layers.Layer) -> int:
    """Number of hidden units of each expert; 0 if this is no layer of experts."""
    weights = {weight.name: weight for weight in layer.weights} if is_of_keras_hub(layer) else {}
    outputs = [weights[name] for name in _OUTPUTS if name in weights]
    is_known = len(outputs) == 1 and weights.keys() <= {*_UNITS, _BIAS}
    return outputs[0].shape[1] if is_known and len(outputs[0].shape) == 3 else 0


def splits_of_experts(layer: keras.layers.Layer, size: int) -> tuple[dict[str, Split], tuple[str, ...]] | None:
    """Returns how to divide a layer of experts: splits by name, and names of weights whose gradients are in parts.

    Returns:
      None if it is no such layer, or not divisible.
    """
    units = units_of(layer)
    if not units or units % size or any(weight.constraint is not None for weight in layer.weights):
        return None
    splits = {}
    for weight in layer.weights:
        if weight.name in _UNITS:
            axis = _UNITS[weight.name]
            groups = 1 if weight.name in _IN_TURN else weight.shape[axis] // units
            splits[weight.name] = Split(axis, size, groups)
    return splits, tuple(weight.name for weight in layer.weights if weight.name == _BIAS)


class PartOfExperts:
    """A device's summand of the outputs of all experts, `[E, T, h]`; as a tensor, it is their sum over devices.

    Args:
      place: The device.
      own: The summand.
    """

    def __init__(self, place: Place, own: tf.Tensor) -> None:
        self._place, self._own = place, own

    def __mul__(self, weights: tf.Tensor) -> tf.Tensor:
        """The outputs, weighed by `[E, T, 1]` and added up: `[1, T, h]`, of which the sum over experts is the same.

        The gradient of the weights is the sum over devices.
        """
        weighted = self._own * self._place.enter(weights)
        return self._place.leave(tf.reduce_sum(weighted, axis=0, keepdims=True))

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        """See `tf.types.experimental.SupportsTensor`; for a reader that does anything else."""
        return tf.convert_to_tensor(self._place.leave(self._own), dtype, name=name)


def call_experts(place: Place, layer: Any, plain: Any, hidden: tf.Tensor) -> PartOfExperts:
    """Computes the part of a device; of a bias, which all devices have, each adds an equal share."""
    own = plain(place.enter(hidden))
    for bias in layer.weights:
        if bias.name == _BIAS:
            own -= (1 - 1 / place.size) * ops.expand_dims(ops.cast(bias, own.dtype), axis=1)
    return PartOfExperts(place, own)

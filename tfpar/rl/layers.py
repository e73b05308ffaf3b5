"""Layers of policies. Importing this module registers them with Keras; it needs no other module of tfpar.

Shapes: m observations, d the shape of one observation, a numbers per action.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

_EPSILON = 1e-8
_LIMIT = 10.0  # standard deviations


@keras.saving.register_keras_serializable(package="tfpar")
class ObservationNormalization(keras.layers.Layer):
    """Subtracts the running mean, divides by the running deviation, and clips at 10 deviations.

    Before the first update of the statistics, observations pass through unchanged. Under mixed precision too, the
    observations are scaled in float32, and only the result has the dtype in which the policy computes.

    A policy may have one such layer, in a nested model too. It must read the raw observations, because its statistics
    are theirs.
    """

    def __init__(self, **options: Any) -> None:
        # Keras 3.15 otherwise casts the inputs to the compute dtype: in bfloat16, 100.1 is 100.
        super().__init__(**options, autocast=False)

    def build(self, input_shape: Any) -> None:
        """Creates the statistics, and the sums for their next update."""
        shape = tuple(input_shape[1:])
        zeros = {"trainable": False, "dtype": "float32", "initializer": "zeros", "autocast": False}
        self.mean = self.add_weight(shape=shape, name="mean", **zeros)
        self.variance = self.add_weight(shape=shape, name="variance", **{**zeros, "initializer": "ones"})
        self.observations = self.add_weight(shape=(), name="observations", **zeros)
        # Sums over the transitions learned from since the last update: their share of the rollout, and the means of
        # x - mean and of its square. All minibatches have the same size, so replicas may average the sums.
        self.new_share = self.add_weight(shape=(), name="new_share", **zeros)
        self.new_offset = self.add_weight(shape=shape, name="new_offset", **zeros)
        self.new_square = self.add_weight(shape=shape, name="new_square", **zeros)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the scaled observations `[m, *d]`."""
        mean, variance = keras.ops.convert_to_tensor(self.mean), keras.ops.convert_to_tensor(self.variance)
        scaled = (keras.ops.cast(inputs, "float32") - mean) * keras.ops.rsqrt(variance + _EPSILON)
        return keras.ops.cast(keras.ops.clip(scaled, -_LIMIT, _LIMIT), self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the inputs."""
        return input_shape


@keras.saving.register_keras_serializable(package="tfpar")
class LogDeviation(keras.layers.Layer):
    """The logarithm of an action's standard deviation: learned, and the same for every observation."""

    def build(self, input_shape: Any) -> None:
        """Creates the weight with the initial value 0, which is a deviation of 1."""
        self.value = self.add_weight(shape=tuple(input_shape[1:]), name="value", initializer="zeros", dtype="float32")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the log deviations `[m, a]` for means `[m, a]`."""
        value = keras.ops.convert_to_tensor(self.value)
        return keras.ops.zeros_like(inputs) + keras.ops.cast(value, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the means."""
        return input_shape

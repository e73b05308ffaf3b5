"""Policies: the model that computes a policy and a value, and the distribution of actions from its outputs.

Shapes: m observations; a numbers per action, or actions to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfpar.rl import noise
from tfpar.rl.environments import Actions, Discrete
from tfpar.rl.layers import LogDeviation, ObservationNormalization

import keras
import tensorflow as tf

_PIXEL_DIMS = 3
# For pictures: filters, size and stride of each convolution (Mnih et al. 2015), and the smallest side that they accept.
_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_SMALLEST_CONVOLVED = 36


def build_policy(
    observation_shape: Sequence[int],
    actions: Actions,
    *,
    hidden: Sequence[int] = (64, 64),
    normalize: bool = True,
    scale: float = 1.0,
) -> keras.Model:
    """Builds a policy and a value network, which share only the weights that read pictures.

    Hidden layers have tanh activations. Weights are initially orthogonal, with gain √2; the gain is 0.01 before the
    actions, so that the first policy is nearly uniform, and 1 before the value (Andrychowicz et al. 2021, What Matters
    for On-Policy Deep Actor-Critic Methods). Three convolutions (Mnih et al. 2015) read pictures of at least 36 x 36
    pixels; smaller pictures are flattened.

    Args:
      observation_shape: Shape of one observation.
      actions: The action space.
      hidden: Units of the hidden layers.
      normalize: Whether observations are scaled by their running mean and variance; pictures are not.
      scale: Factor on observations that are not scaled by their running mean and variance.

    Returns:
      A model `observations [m, ...] -> (logits or means [m, a], value [m, 1])`. For continuous actions it has a third
      output, the logarithm of their standard deviation `[m, a]`.
    """
    observation = keras.Input(tuple(observation_shape), name="observation")
    x = observation
    if normalize and len(observation_shape) < _PIXEL_DIMS:
        x, scale = ObservationNormalization(name="observation_normalization")(x), 1.0
    x = _flat(x, scale)
    name = "logits" if isinstance(actions, Discrete) else "means"
    # Logits and values are sums of many numbers, so they are float32 under mixed precision too.
    outputs = [
        keras.layers.Dense(actions.outputs, kernel_initializer=_orthogonal(0.01), dtype="float32", name=name)(
            _hidden(x, hidden, "policy")
        ),
        keras.layers.Dense(1, kernel_initializer=_orthogonal(1.0), dtype="float32", name="value")(
            _hidden(x, hidden, "critic")
        ),
    ]
    if not isinstance(actions, Discrete):
        outputs.append(LogDeviation(dtype="float32", name="log_deviation")(outputs[0]))
    return keras.Model(observation, outputs, name="policy")


def _flat(x: Any, scale: float) -> Any:
    """Returns observations as vectors `[m, features]`."""
    shape = x.shape[1:]
    if scale != 1.0:
        x = keras.layers.Rescaling(scale, name="rescaling")(x)
    if len(shape) == _PIXEL_DIMS and min(shape[:2]) >= _SMALLEST_CONVOLVED:
        for place, (filters, size, stride) in enumerate(_CONVOLUTIONS):
            x = keras.layers.Conv2D(
                filters, size, stride, activation="relu", kernel_initializer="he_normal", name=f"convolution_{place}"
            )(x)
    return keras.layers.Flatten(name="flatten")(x) if len(shape) > 1 else x


def _hidden(x: Any, units: Sequence[int], name: str) -> Any:
    for place, count in enumerate(units):
        dense = keras.layers.Dense(
            count, "tanh", kernel_initializer=_orthogonal(math.sqrt(2.0)), name=f"{name}_hidden_{place}"
        )
        x = dense(x)
    return x


def _orthogonal(gain: float) -> keras.initializers.Initializer:
    return keras.initializers.Orthogonal(gain)


def build_q_network(
    observation_shape: Sequence[int], actions: Discrete, *, hidden: Sequence[int] = (128, 128), scale: float = 1.0
) -> keras.Model:
    """Builds a Q network (Mnih et al. 2015) with ReLU activations; it reads pictures as `build_policy` does.

    Args:
      observation_shape: Shape of one observation.
      actions: The action space.
      hidden: Units of the hidden layers.
      scale: Factor on observations, applied first.

    Returns:
      A model `observations [m, ...] -> values [m, a]`.
    """
    observation = keras.Input(tuple(observation_shape), name="observation")
    x = _flat(observation, scale)
    for place, count in enumerate(hidden):
        x = keras.layers.Dense(count, "relu", kernel_initializer="he_normal", name=f"hidden_{place}")(x)
    values = keras.layers.Dense(actions.outputs, dtype="float32", name="action_values")(x)
    return keras.Model(observation, values, name="q_network")


class Distribution(NamedTuple):
    """The distribution of actions from the outputs of a policy.

    Attributes:
      parameters: Logits `[m, a]`; or means and log deviations, both `[m, a]`.
    """

    parameters: tuple[tf.Tensor, ...]

    @classmethod
    def of(cls, outputs: Sequence[tf.Tensor]) -> Distribution:
        """Returns the distribution from the outputs of a policy or a Q network.

        Args:
          outputs: Logits and value; means, value and log deviations; or values of actions, of which the greatest is the
            most likely action.
        """
        outputs = [outputs] if tf.is_tensor(outputs) else outputs
        return cls(tuple(tf.cast(outputs[place], tf.float32) for place in (0, 2) if place < len(outputs)))

    @property
    def discrete(self) -> bool:
        """Whether actions are discrete."""
        return len(self.parameters) == 1

    def sample(self, seed: tf.Tensor, index: tf.Tensor, time: tf.Tensor) -> tf.Tensor:
        """Draws actions: int32 `[m]`, or float32 `[m, a]`; the arguments are those of `noise.uniforms`."""
        drawn = {"seed": seed, "stream": noise.ACTION, "index": index, "time": time}
        if self.discrete:
            # The action whose part of [0, 1) contains a uniform number.
            ends = tf.cumsum(tf.nn.softmax(self.parameters[0]), axis=-1)
            place = noise.uniforms(1, **drawn)[0][:, tf.newaxis]
            return tf.reduce_sum(tf.cast(place >= ends[:, :-1], tf.int32), axis=-1)
        means, logs = self.parameters
        return means + tf.exp(logs) * tf.stack(noise.normals(means.shape[-1], **drawn), axis=-1)

    def mode(self) -> tf.Tensor:
        """Returns the most likely actions."""
        first = self.parameters[0]
        return tf.argmax(first, axis=-1, output_type=tf.int32) if self.discrete else first

    def log_prob(self, action: tf.Tensor) -> tf.Tensor:
        """Returns the logarithm of the probability, or density, of actions: float32 `[m]`."""
        if self.discrete:
            logits = self.parameters[0]
            chosen = tf.one_hot(action, logits.shape[-1])
            return tf.reduce_sum(tf.nn.log_softmax(logits) * chosen, axis=-1)
        means, logs = self.parameters
        away = (action - means) * tf.exp(-logs)
        return tf.reduce_sum(-0.5 * away * away - logs - 0.5 * math.log(2.0 * math.pi), axis=-1)

    def entropy(self) -> tf.Tensor:
        """Returns the entropy in nats, float32 `[m]`."""
        if self.discrete:
            logs = tf.nn.log_softmax(self.parameters[0])
            return -tf.reduce_sum(tf.exp(logs) * logs, axis=-1)
        return tf.reduce_sum(self.parameters[1] + 0.5 * math.log(2.0 * math.pi * math.e), axis=-1)


def value_of(outputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the values of the observations from a policy's outputs, float32 `[m]`."""
    return tf.cast(outputs[1], tf.float32)[:, 0]

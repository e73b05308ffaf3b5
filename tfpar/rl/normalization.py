"""The running statistics that scale observations: pure functions that collect, average and update them.

The layer itself is in `layers.py`: it is part of the policy, so that `model.keras` takes raw observations.

The statistics in use do not change between two rollouts, so that actions are evaluated under the policy that chose
them. The contribution of a rollout is collected separately while the policy learns from it, averaged over the replicas
like batch statistics, and added to the statistics before the next rollout.

Shapes: d is the shape of an observation.
"""

from __future__ import annotations

from tfpar.optim.keras_internals import all_layers
from tfpar.rl.layers import ObservationNormalization
from tfpar.training.objective import Tensors

import keras
import tensorflow as tf


def normalization_layers(model: keras.Model) -> list[ObservationNormalization]:
    """Returns the normalization layers of a model, those in nested models and layers included."""
    found = {id(layer): layer for layer in all_layers(model) if isinstance(layer, ObservationNormalization)}
    return [*found.values()]


class Statistics:
    """Pure functions on the statistics of a model's normalization layer; they do nothing for a model without one.

    Args:
      model: A built Keras model, with at most one such layer.
    """

    def __init__(self, model: keras.Model) -> None:
        places = {id(variable): place for place, variable in enumerate(model.non_trainable_variables)}
        self._places = [places[id(variable)] for layer in normalization_layers(model) for variable in layer.weights]

    @property
    def variables(self) -> list[int]:
        """Indices of the statistics among the model's non-trainable variables."""
        return self._places

    def collected(self, state: Tensors, x: tf.Tensor, share: tf.Tensor) -> Tensors:
        """Returns the model's state after collecting observations.

        A number whose square is not finite counts as the mean.

        Args:
          state: Values of the model's non-trainable variables.
          x: Observations `[m, *d]`.
          share: Float32 `[m]`: the fraction that each observation is of all observations of a rollout on this replica;
            0 excludes the observation.
        """
        if not self._places:
            return state
        mean, variance, count, total, offset, square = (state[place] for place in self._places)
        weight = tf.reshape(share, [-1, *[1] * (x.shape.rank - 1)])
        away = tf.cast(x, tf.float32) - mean
        # What the layer clips, statistics would keep forever.
        away = tf.where(tf.math.is_finite(away * away), away, 0.0)
        offset += tf.reduce_sum(weight * away, axis=0)
        square += tf.reduce_sum(weight * away * away, axis=0)
        return self._replaced(state, [mean, variance, count, total + tf.reduce_sum(share), offset, square])

    def taken_over(self, state: Tensors, observations: int) -> Tensors:
        """Returns the model's state with the collected sums merged into the statistics (Chan, Golub and LeVeque 1979).

        Args:
          state: Values of the model's non-trainable variables.
          observations: Number of observations of a rollout, over all replicas.
        """
        if not self._places:
            return state
        mean, variance, count, share, offset, square = (state[place] for place in self._places)
        added = share * observations
        total = count + added
        part = tf.math.divide_no_nan(added, total)
        # Not all of a rollout may have been collected: steps that are skipped, or that a resumed run gathers again.
        offset, square = (tf.math.divide_no_nan(each, share) for each in (offset, square))
        spread = tf.maximum(square - offset * offset, 0.0)
        mixed = variance * (1.0 - part) + spread * part + offset * offset * part * (1.0 - part)
        variance = tf.where(added > 0.0, mixed, variance)
        zeros = [tf.zeros_like(each) for each in (share, offset, square)]
        return self._replaced(state, [mean + offset * part, variance, total, *zeros])

    def _replaced(self, state: Tensors, values: Tensors) -> Tensors:
        result = list(state)
        for place, value in zip(self._places, values, strict=True):
            result[place] = value
        return result

"""What is left of a training step once gradients and sidecar are reduced over all replicas."""

from __future__ import annotations

from typing import NamedTuple

from tfpar.training import sidecar
from tfpar.training.objective import Tensors

import tensorflow as tf


class Reduced(NamedTuple):
    """The results of parts 3 to 5 of a step.

    Attributes:
      vector: The summed sidecar.
      norm: L2 norm of the mean gradient before clipping; zero if it was not requested.
      exchanged: Host time at which the exchange was over.
      done: A tensor that exists when the weights have their new values.
    """

    vector: tf.Tensor
    norm: tf.Tensor
    exchanged: tf.Tensor
    done: tf.Tensor


class ReducedGradients(NamedTuple):
    """The inputs of a replica's update; all but `state` are the same on every replica.

    Attributes:
      gradients: Gradient sums over all replicas.
      vector: The summed sidecar.
      state: The model state that this replica has computed, and the values of overwritten variables.
      assigned: Weights that the forward pass assigned, by index; the update starts from them.
      factor: Turns the gradient sums into the gradient to apply: their mean, clipped.
      step: Int64 scalar: number of the step.
      lr_multiplier: Float32 scalar that the scheduled learning rate is multiplied by.
    """

    gradients: Tensors
    vector: tf.Tensor
    state: Tensors
    assigned: dict[int, tf.Tensor]
    factor: tf.Tensor
    step: tf.Tensor
    lr_multiplier: tf.Tensor


def should_apply(vector: tf.Tensor) -> tf.Tensor:
    """Whether the summed sidecar calls for an update: all replicas are finite, and there are examples."""
    return tf.equal(vector[sidecar.NON_FINITE], 0.0) & (vector[sidecar.COUNT] > 0.0)

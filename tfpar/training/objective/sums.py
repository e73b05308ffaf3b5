"""The results of the forward and the backward pass of a micro-batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfpar.training.model.call import CallRecord
from tfpar.training.objective.protocol import ObjectiveSums, Tensors

import tensorflow as tf


class LocalSums(NamedTuple):
    """What one replica contributes to a step. Sums, not means, so that contributions of any size add up.

    Attributes:
      loss: Float32 scalar: sum over examples of weight x loss.
      count: Float32 scalar: sum of the example weights.
      gradients: Float32, shaped like the parameters: gradient of `loss`, times the loss scale.
      state: The model's non-trainable variables after the micro-batches.
      metrics: Additive metric state gathered from these examples, a flat list over all metrics.
      assigned: Values that the forward passes assigned to trainable variables (as `SpectralNormalization` does), by
        index; the optimizer's update starts from them. The same on every replica.
      overwritten: New values of the trainable variables that the optimizer overwrites, see `Core.overwritten`.
    """

    loss: tf.Tensor
    count: tf.Tensor
    gradients: Tensors
    state: Tensors
    metrics: Tensors
    assigned: dict[int, tf.Tensor]
    overwritten: Tensors


class Forward(NamedTuple):
    """A forward pass whose gradient has not been computed yet.

    Attributes:
      tape: Watches `params`.
      params: The weights of this pass.
      record: The model's side effects.
      sums: The result of the objective.
      scaled: The loss whose gradients are computed.
      divisor: The divisor that keeps 16-bit gradients in range; None for no divisor.
    """

    tape: tf.GradientTape
    params: Tensors
    record: CallRecord
    sums: ObjectiveSums
    scaled: tf.Tensor
    divisor: Any

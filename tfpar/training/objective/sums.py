"""What the forward and the backward pass of a micro-batch leave behind."""

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
      assigned: What the forward passes assigned to trainable variables (`SpectralNormalization` does), by index; the
        optimizer's update starts from these values. The same on every replica.
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
    """A forward pass whose gradient has not been taken.

    Attributes:
      tape: Watches `params`.
      params: The weights that it was made with.
      record: What the model did beside returning outputs.
      sums: What the objective returned.
      scaled: The loss that gradients are taken of.
      divisor: What it was divided by, to keep 16-bit gradients in range; None for nothing.
    """

    tape: tf.GradientTape
    params: Tensors
    record: CallRecord
    sums: ObjectiveSums
    scaled: tf.Tensor
    divisor: Any

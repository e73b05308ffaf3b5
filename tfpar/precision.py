"""Number formats: Keras dtype policies, TensorFloat-32 and dynamic loss scaling.

`mixed_float16` computes in float16 and keeps weights in float32. Small gradients vanish below
float16's smallest number, so the loss is multiplied by a scale before the backward pass and the
gradients are divided by it afterwards (Micikevicius et al. 2018, "Mixed Precision Training",
section 3.2). The scale moves by itself: it halves when a gradient overflows and doubles after a
long run of finite updates.

The scale lives in a `LossScale` of two tensors and moves by the pure function `update`. Every
replica calls it with the same, already agreed, `finite` flag, so that every replica holds the same
scale without talking about it. Keras' `LossScaleOptimizer` cannot be used for this: under a
strategy it trusts the finite check of replica 0 alone (Keras 3.15.1).
"""

from __future__ import annotations

from typing import NamedTuple

from tfpar.config import PRECISIONS, PrecisionConfig, unknown_name

import keras
import tensorflow as tf

MAXIMUM_LOSS_SCALE = 2.0**24


class LossScale(NamedTuple):
    """The state of dynamic loss scaling.

    Attributes:
      scale: float32 []. What the loss is multiplied by.
      good_steps: int32 []. Finite updates in a row since the scale last moved.
    """

    scale: tf.Tensor
    good_steps: tf.Tensor


def policy(precision: str) -> keras.DTypePolicy:
    """The Keras dtype policy of a precision.

    Args:
      precision: `float32`, `mixed_bfloat16` or `mixed_float16`.

    Raises:
      ConfigError: Another name.
    """
    if precision not in PRECISIONS:
        raise unknown_name("--precision", precision, PRECISIONS)
    return keras.DTypePolicy(precision)


def set_policy(config: PrecisionConfig) -> keras.DTypePolicy:
    """Makes a precision the process' default; models built afterwards follow it.

    Args:
      config: `precision` becomes Keras' global dtype policy. `tf32` lets NVIDIA GPUs since Ampere
        round the inputs of float32 matrix products to 10 mantissa bits; it changes nothing elsewhere.

    Returns:
      The policy that was set.
    """
    chosen = policy(config.precision)
    keras.config.set_dtype_policy(chosen)
    tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
    return chosen


def uses_loss_scale(precision: str) -> bool:
    """Whether a precision needs loss scaling: float16 does, bfloat16 has float32's range."""
    return policy(precision).compute_dtype == "float16"


def growth_steps(config: PrecisionConfig) -> int:
    """`growth_steps` for `update`: the configured run of finite updates, or 0 where the scale is fixed at 1."""
    return config.loss_scale_growth_steps if uses_loss_scale(config.precision) else 0


def initial(config: PrecisionConfig) -> LossScale:
    """The state before the first update: the configured scale for float16, otherwise 1."""
    scale = config.initial_loss_scale if uses_loss_scale(config.precision) else 1.0
    return LossScale(tf.constant(scale, tf.float32), tf.constant(0, tf.int32))


def update(
    state: LossScale,
    finite: tf.Tensor,
    growth_steps: int,
    *,
    factor: float = 2.0,
    minimum: float = 1.0,
    maximum: float = MAXIMUM_LOSS_SCALE,
) -> LossScale:
    """The loss scale for the next update. Pure: runs in a graph, under XLA and on every replica alike.

    Args:
      state: The scale that the update was computed with.
      finite: bool []. Whether the gradients of all replicas were finite; the same on all of them.
      growth_steps: Finite updates in a row after which the scale grows. 0: the scale never moves.
      factor: What the scale is divided by after an overflow and multiplied by when it grows.
      minimum: The scale does not fall below this.
      maximum: The scale does not rise above this. Beyond 2**24 a float32 loss has no bits to spare.

    Returns:
      The new state: `scale / factor` after an overflow, `scale * factor` after `growth_steps` finite
      updates, both within bounds; otherwise the same scale, one good step further.
    """
    if not growth_steps:
        return state
    good_steps = tf.where(finite, state.good_steps + 1, 0)
    grows = good_steps >= growth_steps
    grown = tf.minimum(state.scale * factor, maximum)
    shrunk = tf.maximum(state.scale / factor, minimum)
    scale = tf.where(finite, tf.where(grows, grown, state.scale), shrunk)
    return LossScale(scale, tf.where(grows, 0, good_steps))

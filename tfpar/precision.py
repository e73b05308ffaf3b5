"""Number formats: Keras dtype policies, TensorFloat-32 and dynamic loss scaling.

`mixed_float16` computes in float16 and keeps weights in float32. Small gradients vanish below
float16's smallest number, so the loss is multiplied by a scale before the backward pass and the
gradients are divided by it afterwards (Micikevicius et al. 2018, "Mixed Precision Training",
section 3.2). The scale adjusts itself: it halves when a gradient overflows and doubles after
many consecutive finite steps.

The scale is held in a `LossScale` of two tensors and changed by the pure function `update`. Every
replica calls it with the same `finite` flag, on which they have agreed, so that all replicas have the
same scale without further communication. Keras' `LossScaleOptimizer` cannot be used for this: under a
strategy it relies on the finite check of replica 0 alone (Keras 3.15.1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tfpar.config import PRECISIONS, PrecisionConfig, unknown_name

import keras
import tensorflow as tf

MAXIMUM_LOSS_SCALE = 2.0**24


class LossScale(NamedTuple):
    """The state of dynamic loss scaling.

    Attributes:
      scale: float32 []. What the loss is multiplied by.
      good_steps: int32 []. Consecutive finite steps since the scale last changed.
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


def of_process() -> str:
    """The precision of Keras' global dtype policy; `float32` if it is another policy."""
    name = keras.config.dtype_policy().name
    return name if name in PRECISIONS else "float32"


def set_policy(config: PrecisionConfig) -> keras.DTypePolicy:
    """Makes a precision the default of the process, for models built afterwards.

    Args:
      config: `precision` becomes Keras' global dtype policy. `tf32` lets NVIDIA GPUs since Ampere
        round the inputs of float32 matrix products to 10 mantissa bits; other devices ignore it. `float32` leaves a
        program that has called `keras.config.set_floatx("float64")` its float64.

    Returns:
      The policy that was set.
    """
    chosen = policy(config.precision)
    if config.precision == "float32" and keras.config.floatx() == "float64":
        chosen = keras.DTypePolicy("float64")
    keras.config.set_dtype_policy(chosen)
    tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
    return chosen


def match_process(config: PrecisionConfig) -> None:
    """Makes a precision the default of the process if it has another; unlike `set_policy`, changes nothing else."""
    if config.precision != of_process():
        keras.config.set_dtype_policy(policy(config.precision))


def uses_loss_scale(precision: str) -> bool:
    """Whether a precision needs loss scaling: float16 does; bfloat16 has the range of float32."""
    return policy(precision).compute_dtype == "float16"


def growth_steps(config: PrecisionConfig) -> int:
    """`growth_steps` for `update`: the configured number of finite steps, or 0 if the scale is fixed at 1."""
    return config.loss_scale_growth_steps if uses_loss_scale(config.precision) else 0


def initial(config: PrecisionConfig) -> LossScale:
    """The state before the first step: the configured scale for float16, otherwise 1."""
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
    """The loss scale for the next step. Pure: works in a graph, under XLA and on every replica.

    Args:
      state: The scale that the step was computed with.
      finite: bool []. Whether the gradients of all replicas were finite; equal on all replicas.
      growth_steps: Consecutive finite steps after which the scale grows. 0: the scale never changes.
      factor: The scale is divided by it after an overflow and multiplied by it when it grows.
      minimum: Lower bound of the scale.
      maximum: Upper bound of the scale. Above 2**24 a float32 loss loses bits.

    Returns:
      The new state: `scale / factor` after an overflow, `scale * factor` after `growth_steps` finite
      steps, both within bounds; otherwise the same scale with one more good step.
    """
    if not growth_steps:
        return state
    good_steps = tf.where(finite, state.good_steps + 1, 0)
    grows = good_steps >= growth_steps
    grown = tf.minimum(state.scale * factor, maximum)
    shrunk = tf.maximum(state.scale / factor, minimum)
    scale = tf.where(finite, tf.where(grows, grown, state.scale), shrunk)
    return LossScale(scale, tf.where(grows, 0, good_steps))


def difference(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """`one - other` as float32. Of float64 values, which may be counts, the difference is rounded, not the values."""
    wide = _at_least_float32(one)
    return tf.cast(tf.cast(one, wide) - tf.cast(other, wide), tf.float32)


def moved(value: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
    """`value + change`, for a float32 change, in the dtype of the value; computed in float32, or in float64."""
    wide = _at_least_float32(value)
    return tf.cast(tf.cast(value, wide) + tf.cast(change, wide), value.dtype)


def _at_least_float32(value: tf.Tensor) -> tf.DType:
    return tf.float64 if value.dtype == tf.float64 else tf.float32


def loss_divisor(weight: tf.Tensor, *, counted: bool = False) -> Any:
    """The number by which the loss of a micro-batch is divided for the backward pass.

    Gradients are sums over examples, which are larger than the means that loss scales are designed for, by a factor of
    the micro-batch size. Dividing the float16 backward pass by a power of two and multiplying afterwards is exact.

    Args:
      weight: Weights of the examples, float32 `[m]`; padding has 0.
      counted: Whether to divide by the number of examples without padding, as `fit` does. The statistics of gradients
        that float8 layers keep depend on it.

    Returns:
      The largest power of two up to the micro-batch size, or the number of examples (1 if there are none); a float or a
      float32 scalar.
    """
    if counted:
        return tf.maximum(tf.cast(tf.math.count_nonzero(weight), tf.float32), 1.0)
    if weight.shape[0] is not None:
        return float(1 << (int(weight.shape[0]).bit_length() - 1))
    size = tf.size(weight)
    for shift in (1, 2, 4, 8, 16):
        size = tf.bitwise.bitwise_or(size, tf.bitwise.right_shift(size, shift))
    return tf.cast(size - tf.bitwise.right_shift(size, 1), tf.float32)

"""Batch normalisation that ignores padding and can share its statistics between replicas.

Shapes: m is the number of examples in a micro-batch (padding included), C the number of channels.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tfpar.collectives.replicas import sum_over_replicas
from tfpar.optim.keras_internals import all_layers

import keras
import tensorflow as tf


class _WeightStack(threading.local):
    """Open `example_weights` contexts of this thread, innermost last.

    Per thread, because MirroredStrategy traces the function of every replica in a separate thread.
    """

    def __init__(self) -> None:
        self.weights: list[tf.Tensor] = []


_stack = _WeightStack()


@contextlib.contextmanager
def example_weights(weight: tf.Tensor) -> Iterator[None]:
    """Sets the weight of each example in every `BatchNormalization` called inside the context.

    Open it around the model's call, and around the gradient as well if layers are rematerialised,
    since the backward pass traces those again.

    Args:
      weight: float32 [m], not negative. An example of weight 0 (padding) does not enter the
        statistics; other weights give weighted moments. No gradient flows into the weights.
    """
    _stack.weights.append(tf.convert_to_tensor(weight, tf.float32))
    try:
        yield
    finally:
        _stack.weights.pop()


def current_example_weights() -> tf.Tensor | None:
    """Returns the weights float32 [m] of the innermost open `example_weights`, or None."""
    return _stack.weights[-1] if _stack.weights else None


@keras.saving.register_keras_serializable(package="tfpar")
class BatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation (Ioffe and Szegedy 2015) with weighted moments.

    With W = sum_i w_i over the examples (times positions) of the batch,

        mean = sum_i w_i x_i / W,    variance = sum_i w_i (x_i - mean)^2 / W,

    where the w_i come from `example_weights` and are 1 outside of it. If W is 0, the moving
    statistics normalise the batch and do not change. Statistics are computed in float32 under every
    dtype policy, in two passes, so that a mean much larger than the deviation loses no precision.

    With `synchronized=True` the sums run over all replicas, and the result equals that of one device
    with the whole batch, up to rounding. That costs two all-reduces of about C floats in the forward
    pass and one of 2C in the backward pass. Under MirroredStrategy, all-reducing within a replica is
    a `merge_call`, which TensorFlow 2.21 refuses inside a nested `tf.function`, a `tf.while_loop`
    or a `tf.cond`, and no all-reduce compiles with XLA outside of TPU: see
    `uses_synchronized_statistics`. In a pipeline, the devices that have the layer's stage sum instead.
    """

    def __init__(
        self,
        axis: int = -1,
        *,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        **kwargs: Any,
    ) -> None:
        """Creates the layer.

        Args:
          axis: The channel dimension; not 0, which indexes the examples.
          momentum: Fraction of the previous moving statistics that a step keeps.
          epsilon: Added to the variance.
          synchronized: Whether the moments are over all replicas.
          **kwargs: As for `keras.layers.BatchNormalization`.

        Raises:
          ValueError: `axis=0`, or `renorm=True`, which weighted moments do not support.
        """
        if axis == 0:
            raise ValueError("BatchNormalization(axis=0): dimension 0 indexes the examples. Use another dimension.")
        if kwargs.get("renorm"):
            raise ValueError("BatchNormalization(renorm=True) is not supported: use keras.layers.BatchNormalization.")
        super().__init__(axis, momentum=momentum, epsilon=epsilon, synchronized=synchronized, **kwargs)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalises a batch.

        Args:
          inputs: [m, ...] with C channels along `axis`.
          training: Whether to normalise by the statistics of the batch and add them to the moving statistics.
          mask: Optional bool, the shape of `inputs` without its last dimension; False counts as weight 0.

        Returns:
          The normalised batch, of the shape of `inputs` and the layer's compute dtype.

        Raises:
          ValueError: The batch does not have as many examples as the open `example_weights`.
        """
        values = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        axis = self.axis % len(values.shape)
        mean = tf.cast(self.moving_mean, values.dtype)
        variance = tf.cast(self.moving_variance, values.dtype)
        if training and self.trainable:
            mean, variance = self._update(values, axis, mask, mean, variance)
        shape = [1] * len(values.shape)
        shape[axis] = values.shape[axis]
        scale = tf.math.rsqrt(variance + self.epsilon)
        if self.gamma is not None:
            scale *= tf.cast(self.gamma, values.dtype)
        # Centred before scaling: x * scale + (beta - mean * scale) would cancel where the mean is large.
        outputs = (values - tf.reshape(mean, shape)) * tf.reshape(scale, shape)
        if self.beta is not None:
            outputs += tf.reshape(tf.cast(self.beta, values.dtype), shape)
        return tf.cast(outputs, self.compute_dtype)

    def _update(
        self, values: tf.Tensor, axis: int, mask: Any, moving_mean: tf.Tensor, moving_variance: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds the batch's moments to the moving statistics, and returns them."""
        weights = _position_weights(values, mask)
        mean, variance, total = _moments(values, weights, axis, self.synchronized)
        has_weight = total > 0.0
        mean = tf.where(has_weight, mean, moving_mean)
        variance = tf.where(has_weight, variance, moving_variance)
        # Without weight the value does not change by a single bit: old + (old - old) * (1 - momentum).
        self.moving_mean.assign(moving_mean + (mean - moving_mean) * (1.0 - self.momentum))
        self.moving_variance.assign(moving_variance + (variance - moving_variance) * (1.0 - self.momentum))
        return mean, variance


def uses_synchronized_statistics(model: keras.layers.Layer) -> bool:
    """Whether a layer of the model all-reduces its statistics between replicas in the forward pass.

    XLA cannot compile such a model if there is more than one replica.

    Args:
      model: Any Keras model or layer; nested models and Keras' own `BatchNormalization(synchronized=True)` count.
    """
    return any(getattr(layer, "synchronized", False) is True for layer in all_layers(model))


def _position_weights(values: tf.Tensor, mask: Any) -> tf.Tensor | None:
    """Returns weights that broadcast against `values`: None if all are 1, [m, 1, ...], or [m, ..., 1] with a mask."""
    weights = current_example_weights()
    if weights is not None:
        examples, expected = values.shape[0], weights.shape[0]
        if examples is not None and expected is not None and examples != expected:
            raise ValueError(
                f"BatchNormalization received {examples} examples, but the step has weights for {expected}. An earlier "
                "layer folds other dimensions into the batch; normalise before folding, or use LayerNormalization."
            )
        weights = tf.reshape(tf.cast(weights, values.dtype), [-1] + [1] * (len(values.shape) - 1))
    if mask is not None:
        mask_weights = tf.cast(tf.expand_dims(mask, -1), values.dtype)
        weights = mask_weights if weights is None else weights * mask_weights
    return weights


def _moments(
    values: tf.Tensor, weights: tf.Tensor | None, axis: int, synchronized: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the weighted mean [C], variance [C] and total weight [] of `values`, over all replicas if `synchronized`.

    As in `tf.nn.moments`, the second derivative treats the mean inside the variance as constant.
    """
    channel_shape = [1] * len(values.shape)
    channel_shape[axis] = values.shape[axis]
    reduce_sum = _replica_sum if synchronized else _local

    @tf.custom_gradient
    def moments(x: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor], Any]:
        # One collective reduces the sums and the total weight.
        sums = reduce_sum(tf.concat([_weighted_sum(x, weights, axis), [_total_weight(x, weights, axis)]], axis=0))
        total = sums[-1]
        mean = tf.math.divide_no_nan(sums[:-1], total)
        centred = x - tf.reshape(mean, channel_shape)
        variance = tf.math.divide_no_nan(reduce_sum(_weighted_sum(tf.square(centred), weights, axis)), total)

        def gradient(d_mean: tf.Tensor, d_variance: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            # d mean / d x_i = w_i / W and d variance / d x_i = 2 w_i (x_i - mean) / W; the path from
            # x_i through the mean to the variance sums to 0. Every replica's loss depends on the shared
            # moments, so their cotangents are summed over replicas: one collective for both.
            cotangents = tf.math.divide_no_nan(reduce_sum(tf.concat([d_mean, d_variance], axis=0)), total)
            by_mean, by_variance = (tf.reshape(part, channel_shape) for part in tf.split(cotangents, 2))
            d_x = by_mean + 2.0 * by_variance * (x - tf.reshape(mean, channel_shape))
            return d_x if weights is None else d_x * weights

        return (mean, variance, total), gradient

    return moments(values)


def _weighted_sum(values: tf.Tensor, weights: tf.Tensor | None, axis: int) -> tf.Tensor:
    """Returns the sum [C] of weights * values over all dims except `axis`."""
    dims = [dim for dim in range(len(values.shape)) if dim != axis]
    if weights is None:
        return tf.reduce_sum(values, dims)
    if all(size == 1 for size in weights.shape[1:]):
        # One weight per example: sum each example first, which saves a pass over the whole batch.
        per_example = tf.reduce_sum(values, dims[1:]) if len(dims) > 1 else values
        return tf.reduce_sum(per_example * tf.reshape(weights, [-1, 1]), 0)
    return tf.reduce_sum(values * weights, dims)


def _total_weight(values: tf.Tensor, weights: tf.Tensor | None, axis: int) -> tf.Tensor:
    """Returns the total weight [] over examples and positions, in the dtype of `values`."""
    positions = tf.size(values) // values.shape[axis]
    if weights is None:
        return tf.cast(positions, values.dtype)
    return tf.reduce_sum(weights) * tf.cast(positions // tf.size(weights), values.dtype)


def _local(value: tf.Tensor) -> tf.Tensor:
    return value


def _replica_sum(value: tf.Tensor) -> tf.Tensor:
    """Returns the sum over the replicas in sync; the value itself with one replica, or outside a replica."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return value
    return sum_over_replicas(value)

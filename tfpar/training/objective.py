"""What training minimises: a pure function from weights and one micro-batch to sums over its examples.

An objective returns sums, not means, so that micro-batches, replicas and workers of any size add up; the step divides
by the summed weight once. `SupervisedObjective` is the usual one, a loss per example. Shapes: m examples a micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.training import metrics as additive_metrics
from tfpar.training.model.call import call_model

import keras
import tensorflow as tf

Tensors = list[tf.Tensor]
Batch = tuple[Any, Any, tf.Tensor]


class ObjectiveSums(NamedTuple):
    """What an objective returns for one micro-batch.

    Attributes:
      loss: Float32 scalar: sum over examples of weight x loss.
      count: Float32 scalar: sum of the example weights, which `loss` is divided by once all sums are added.
      state: The model's non-trainable variables after the micro-batch.
      metrics: Float32: what the examples add to the state of the objective's metrics, a flat list over all of them.
    """

    loss: tf.Tensor
    count: tf.Tensor
    state: Tensors
    metrics: Tensors


class Objective(Protocol):
    """A pure function of weights, model state and a micro-batch. It may read no variable and call no collective."""

    @property
    def metrics(self) -> Sequence[keras.metrics.Metric]:
        """Metrics whose state the objective adds to, see `tfpar.training.metrics`."""

    def __call__(self, params: Tensors, state: Tensors, batch: Batch, *, training: bool) -> ObjectiveSums:
        """Sums over one micro-batch; `ObjectiveSums.loss` is differentiated with respect to `params`.

        Args:
          params: Values of the model's trainable variables.
          state: Values of the model's non-trainable variables, seed states included.
          batch: `(x, y, weight)`, each `[m, ...]`, weight float32 `[m]`; a padded example has weight 0.
          training: Whether the model runs in training mode.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class SupervisedObjective:
    """The loss of a model's outputs against labels, weighted by example.

    Attributes:
      model: A built Keras model.
      loss: `loss(y, outputs)` -> loss per example (any trailing dims are averaged); see `per_example_loss`.
      metrics: Keras metrics whose state is a sum (all state zero after a reset), such as means and counts.
    """

    model: keras.Model
    loss: Callable[[Any, Any], tf.Tensor]
    metrics: Sequence[keras.metrics.Metric] = ()

    def __call__(self, params: Tensors, state: Tensors, batch: Batch, *, training: bool) -> ObjectiveSums:
        """See `Objective`.

        Raises:
          ConfigError: The outputs carry a mask, or the loss does not keep one value per example.
        """
        x, y, weight = batch
        outputs, new_state, extra = call_model(self.model, params, state, x, training=training)
        if any(map(keras_internals.carries_mask, tf.nest.flatten(outputs))):
            raise ConfigError(
                f"the outputs of model {self.model.name!r} carry a mask (mask_zero=True, Masking), which would have to "
                "count in the loss: here it goes by examples, each with the mean over all its positions. Leave the "
                "mask out and give a loss (y, outputs) -> [m] that takes its own mean over the positions that count."
            )
        values = _one_value_per_example(self.loss(y, outputs), weight)
        count = tf.reduce_sum(weight)
        # A padded example repeats a real one, so its loss is finite unless the real one's is not: 0 x NaN stays NaN.
        loss = tf.reduce_sum(values * weight)
        if extra:  # add_loss and regularisers are per batch: times the count, they survive the division once.
            loss += count * tf.add_n([tf.cast(tf.reduce_sum(value), tf.float32) for value in extra])
        return ObjectiveSums(loss, count, list(new_state), additive_metrics.sums(self.metrics, y, outputs, weight))


def _one_value_per_example(values: Any, weight: tf.Tensor) -> tf.Tensor:
    """What a loss returned as float32 `[m]`: the mean over trailing dims.

    Raises:
      ConfigError: There is no dim of examples, or it has another size than `weight`.
    """
    values = tf.cast(values, tf.float32)
    if values.shape.rank is None or values.shape.rank < 1:
        raise ConfigError(
            f"the loss returned a value of shape {values.shape}: it must keep one value per example (Keras losses: "
            "reduction=None), because uneven batches are weighted by example."
        )
    if not values.shape[:1].is_compatible_with(weight.shape):
        raise ConfigError(
            f"the loss returned {values.shape[0]} values for {weight.shape[0]} examples; it must keep one for each."
        )
    if values.shape.rank > 1:
        values = tf.reduce_mean(values, axis=list(range(1, values.shape.rank)))
    return values


def per_example_loss(loss: Any) -> Callable[[Any, Any], tf.Tensor]:
    """Turns what Keras accepts as a loss into a function that keeps one value per example.

    Args:
      loss: A Keras loss, its name, or a function `(y, outputs) -> values [m, ...]`.

    Raises:
      ConfigError: A name Keras does not know.
    """
    try:
        resolved = keras.losses.get(loss)
    except ValueError as error:
        raise ConfigError(f"loss={loss!r} is not known to Keras: {error}") from error
    if resolved is None or not callable(resolved):
        raise ConfigError(f"loss={loss!r} is not a loss: give a Keras loss, its name, or a function (y, outputs).")
    if isinstance(resolved, keras.losses.Loss) and resolved.get_config().get("ignore_class") is not None:
        raise ConfigError(
            "loss: ignore_class would count positions, while here examples are what is weighted, each with the mean "
            "over all its positions. Give a loss (y, outputs) -> [m] that takes its own mean over those that count."
        )
    function = (
        resolved.call if isinstance(resolved, keras.losses.Loss) else functools.partial(_matching_ranks, resolved)
    )
    # Losses are computed in float32 whatever the model computes in.
    return lambda y, outputs: function(y, tf.nest.map_structure(lambda part: tf.cast(part, tf.float32), outputs))


def _matching_ranks(function: Callable[[Any, Any], tf.Tensor], y: Any, outputs: Any) -> tf.Tensor:
    """Calls a loss function as Keras' `compile` does: labels `[m]` and outputs `[m, 1]` (or the other way) alike."""
    if isinstance(y, tf.Tensor) and isinstance(outputs, tf.Tensor):
        y, outputs = keras_internals.matching_ranks(y, outputs)
    return function(y, outputs)


def uses_integer_labels(loss: Any) -> bool:
    """Whether a loss reads labels as class indices into the last dim of the outputs, every one of them.

    Args:
      loss: As for `per_example_loss`.
    """
    resolved = keras.losses.get(loss)
    if isinstance(resolved, keras.losses.SparseCategoricalCrossentropy):
        return resolved.get_config().get("axis", -1) == -1
    return resolved is keras.losses.sparse_categorical_crossentropy

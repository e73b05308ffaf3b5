"""Models that compute their loss themselves, by an overridden `compute_loss`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from tfpar import inputs
from tfpar.config import ConfigError
from tfpar.training import metrics as additive_metrics
from tfpar.training.model.call import Tensors, call_and_then
from tfpar.training.model.support import overriding_class
from tfpar.training.objective import Batch, ObjectiveSums

import keras
import tensorflow as tf


def computes_own_loss(model: keras.Model) -> bool:
    """Whether a class outside Keras overrides the model's `compute_loss`."""
    return bool(overriding_class(model, "compute_loss"))


@dataclasses.dataclass(frozen=True, eq=False)
class OwnLossObjective:
    """The loss that `model.compute_loss` returns for a micro-batch, times its number of examples.

    That is exact where every micro-batch has the same number of examples and no padding, of which `compute_loss` knows
    nothing: `Program.pipeline` refuses other batches. As in `fit`, the method adds `self.losses` itself, or not.

    Attributes:
      model: A built Keras model that overrides `compute_loss(self, x, y, y_pred, sample_weight, training)`.
      metrics: As for `SupervisedObjective`.
    """

    model: keras.Model
    metrics: Sequence[keras.metrics.Metric] = ()

    def __call__(self, params: Tensors, state: Tensors, batch: Batch, *, training: bool) -> ObjectiveSums:
        """See `Objective`.

        Raises:
          ConfigError: `compute_loss` returns no scalar.
        """
        x, y, weight = batch
        labels, sample_weight = y if isinstance(y, inputs.Weighted) else (y, None)
        labels = None if isinstance(labels, tuple) and not labels else labels
        takes_training = "training" in inspect.signature(self.model.compute_loss).parameters
        options = {"training": training} if takes_training else {}

        def own_loss(outputs: Any) -> Any:
            return self.model.compute_loss(x, labels, outputs, sample_weight, **options)

        call, loss = call_and_then(self.model, params, state, x, own_loss, training=training)
        if loss is None or tf.convert_to_tensor(loss).shape.rank != 0:
            raise ConfigError(
                f"compute_loss of model {self.model.name!r} returned {loss!r}: it must return a scalar, the mean over "
                "the examples of the batch."
            )
        count = tf.reduce_sum(weight)
        sums = additive_metrics.sums(self.metrics, labels, call.outputs, weight) if self.metrics else []
        return ObjectiveSums(tf.cast(loss, tf.float32) * count, count, call.state, sums)


def compile_for_own_loss(model: keras.Model, loss: Any) -> None:
    """Compiles a model whose `compute_loss` may call that of Keras, which needs the loss; none that is compiled.

    Args:
      model: A built Keras model that overrides `compute_loss`.
      loss: A Keras loss, its name, or a function; None where the model needs none.
    """
    if loss is not None and not model.compiled:
        model.compile(optimizer=None, loss=loss)

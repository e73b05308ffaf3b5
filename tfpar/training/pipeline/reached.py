"""The weights that the loss of a model in stages reaches.

The tape gives a stage zeros as the gradients of results that the loss does not read, and a worker sends zeros back for
tensors that its loss does not read. The weights behind them have zeros as gradients, and not none.
"""

from __future__ import annotations

from typing import Any

from tfpar.parallel.held import held_by
from tfpar.training.core import Core
from tfpar.training.objective import Tensors
from tfpar.training.pipeline.replica_sums import summing_nothing
from tfpar.training.pipeline.specs import as_if_here, zeros_like
from tfpar.training.pipeline.stages import Pipeline, without_stages

import keras
import tensorflow as tf


def confirm_reached(core: Core, pipeline: Pipeline, params: Tensors, state: Tensors, batch: Any, *others: Any) -> None:
    """Tells `core.unreached` the weights that gradients reach in a trace of the whole model, which is never run.

    Args:
      core: The model and its objective.
      pipeline: Its stages.
      params: As for `Core.accumulate`.
      state: As for `Core.accumulate`.
      batch: As for `Core.accumulate`.
      others: The other arguments of `TrainStep._contribution`; the last one is the factors of the loss terms.
    """
    model, scales = core.model, others[-1]

    def trace(seed: tf.Tensor, *parts: tf.Tensor) -> None:
        factors = None if scales is None else tf.ones([core.objective.totals.terms])
        weights = [*map(_stand_in, model.trainable_variables, params)]
        own = [*map(_stand_in, model.non_trainable_variables, state)]
        with pipeline.on_no_device(), as_if_here(model), summing_nothing(), without_stages():
            forward = core.forward(weights, own, tf.nest.pack_sequence_as(batch, parts), seed, None, factors)
            found = forward.tape.gradient(forward.scaled, forward.params)
        core.unreached.confirm(place for place, gradient in enumerate(found) if gradient is not None)

    specs = [tf.TensorSpec(part.shape[1:], part.dtype) for part in tf.nest.flatten(batch)]
    tf.function(trace, autograph=False).get_concrete_function(tf.TensorSpec([2], tf.int32), *specs)


def _stand_in(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Zeros in the shape of a value, or of that of a worker that has the variable."""
    return tf.zeros(value.shape, value.dtype) if held_by(variable) is None else zeros_like(variable)

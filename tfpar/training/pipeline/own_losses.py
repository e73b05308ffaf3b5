"""Refuses losses of the user's own that a pipeline over several workers would compute otherwise than one device.

The last worker alone has the outputs and computes the loss. Each worker has the weights of its own stages, and adds the
losses of its layers by itself, as Keras does.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.optim.keras_draws import drawing
from tfpar.parallel.held import held_by
from tfpar.parallel.split import shape_of
from tfpar.parallel.weight_shards import traced_whole
from tfpar.training.model.own_loss import OwnLossObjective
from tfpar.training.model.penalties import without_penalties
from tfpar.training.objective import Objective, SupervisedObjective
from tfpar.training.objective.outputs import EXAMPLES, examples_of, outputs_of, with_examples

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)

_WAY_OUT = "use a pipeline within a worker, or --mesh=data:... alone"
_ADDED = 2  # losses of layers that are made up; `compute_loss` may choose among them by their place


def check_loss_over_workers(objective: Objective, input_spec: Any, label_spec: Any, *, last: int) -> None:
    """Tries a `compute_loss` on examples that are made up; every worker comes to the same result.

    Args:
      objective: The objective.
      input_spec: Structure of `tf.TensorSpec`, of one example.
      label_spec: The same of the labels.
      last: Rank of the worker with the outputs.

    Raises:
      ConfigError: The objective is the user's own; or `compute_loss` calls the model, reads weights of other workers,
        or does not add the losses of layers as Keras does.
    """
    if isinstance(objective, SupervisedObjective):
        return
    if not isinstance(objective, OwnLossObjective):
        raise ConfigError(
            f"--mesh: objective=... ({type(objective).__name__}) calls the model and sums over examples by itself. In "
            "a pipeline over several workers only the last one has the outputs. Train with a loss of the outputs, or "
            f"{_WAY_OUT}."
        )
    model = objective.model
    outputs = outputs_of(model, input_spec, EXAMPLES)
    x = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), with_examples(input_spec, EXAMPLES))
    labels = with_examples(label_spec, EXAMPLES)
    y = tf.nest.pack_sequence_as(labels, examples_of(tf.nest.flatten(labels)))
    made_up = keras.tree.pack_sequence_as(outputs.structure, examples_of(outputs.structure))
    for training in (True, False):
        trial = _Trial(objective, training=training)
        try:
            factors = tf.function(trial, autograph=False)(x, y, made_up)
        except Exception as error:  # of the user's code, which may need a batch of another size
            _log.warning(
                "compute_loss of model %r could not be tried on %d examples that are made up (%s: %s): it has to add "
                "self.losses as Keras does, because each worker of the pipeline adds the losses of its own layers",
                *(model.name, EXAMPLES, type(error).__name__, str(error).partition("\n")[0]),
            )
            return
        if trial.calls_model:
            raise ConfigError(
                f"--mesh: compute_loss of model {model.name!r} calls the model again. In a pipeline over several "
                f"workers the last one alone computes the loss. Compute it from y_pred, or {_WAY_OUT}."
            )
        for variable in trial.read:
            if (held := held_by(variable)) and last not in held.ranks:
                raise ConfigError(
                    f"--mesh: compute_loss of model {model.name!r} reads the weight {variable.path!r}. In a pipeline "
                    "over several workers the last one computes the loss, and does not have this weight. Add the loss "
                    f"in a layer (add_loss, a regularizer), or {_WAY_OUT}."
                )
        if any(abs(float(factor) - 1.0) > 1e-3 for factor in factors) and outputs.adds_losses():
            raise ConfigError(
                f"--mesh: compute_loss of model {model.name!r} does not add self.losses as Keras does. In a pipeline "
                "over several workers each adds the losses of its own layers. Add sum(self.losses), as "
                f"super().compute_loss does, or {_WAY_OUT}."
            )


class _Trial:
    """A trial of `compute_loss` with weights that are zero.

    Args:
      objective: The objective.
      training: Whether in training.

    Attributes:
      calls_model: Whether it has called the model.
      read: The variables that it has read.
    """

    def __init__(self, objective: OwnLossObjective, *, training: bool) -> None:
        self._objective, self._training = objective, training
        self.calls_model = False
        self.read: list[keras.Variable] = []

    def __call__(self, x: Any, y: Any, outputs: Any) -> list[tf.Tensor]:
        """The derivatives of the loss with respect to losses of layers."""
        model, scope = self._objective.model, _Reads(self.read)
        added = [tf.zeros([]) for _ in range(_ADDED)]
        with tf.GradientTape() as tape, keras_internals.unscaled_losses(), without_penalties(model), drawing():
            tape.watch(added)
            with traced_whole(model.variables), keras_calls.watched_calls(model, self._called), scope:
                for variable in model.variables:
                    scope.state_mapping[id(variable)] = tf.zeros(shape_of(variable), variable.dtype)
                for loss in added:
                    keras_calls.add_loss(model, scope, loss)
                loss = self._objective.loss_of(x, y, outputs, training=self._training)
        return tape.gradient(loss, added, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    def _called(self, layer: keras.layers.Layer) -> contextlib.AbstractContextManager[None]:
        self.calls_model |= layer is self._objective.model
        return contextlib.nullcontext()


class _Reads(keras.StatelessScope):
    """Notes the variables that are read."""

    def __init__(self, read: list[keras.Variable]) -> None:
        super().__init__(collect_losses=True)
        self._read = read

    def get_current_value(self, variable: keras.Variable) -> Any:
        self._read.append(variable)
        return super().get_current_value(variable)

"""Models that compute their loss themselves, by an overridden `compute_loss`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from tfpar import inputs
from tfpar.config import ConfigError
from tfpar.optim.keras_compile import set_loss
from tfpar.training.model.call import Tensors, call_and_then
from tfpar.training.model.support import overriding_class
from tfpar.training.objective import Batch, Goal, Objective, ObjectiveSums, OwnGoal, SupervisedObjective, Totals
from tfpar.training.objective import metrics as additive_metrics
from tfpar.training.objective.metrics import MetricTerm, build_metrics
from tfpar.training.objective.outputs import check_inputs, check_labels, outputs_of, with_examples
from tfpar.training.objective.supervised import weight_of_each

import keras
import numpy as np
import tensorflow as tf

_TRIED_EXAMPLES = 7


def computes_own_loss(model: keras.Model) -> bool:
    """Whether a class outside Keras overrides the model's `compute_loss`."""
    return bool(overriding_class(model, "compute_loss"))


@dataclasses.dataclass(frozen=True, eq=False)
class _Bound:
    """The metrics of a goal, assigned to labels and outputs."""

    metrics: Sequence[MetricTerm]
    totals: Totals
    labels: Any
    inputs: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class OwnLossObjective:
    """The loss that `model.compute_loss` returns for a micro-batch, times its number of examples.

    This is exact if every micro-batch has the same number of examples and no padding, which `compute_loss` would count:
    `Program.pipeline` refuses other batches. As in `fit`, adding `self.losses` is up to the method.

    Attributes:
      model: A built Keras model that overrides `compute_loss(self, x, y, y_pred, sample_weight, training)`.
      goal: Its metrics are those of the run; the override may call Keras' `compute_loss`, which reads its loss.
    """

    model: keras.Model
    goal: Goal
    _bound: list[_Bound] = dataclasses.field(default_factory=list, repr=False)

    def bind(self, input_spec: Any, label_spec: Any) -> None:
        """Assigns the metrics to the outputs; see `SupervisedObjective.bind`."""
        if self._bound:
            check_labels(label_spec, self._bound[0].labels)
            check_inputs(self.model, input_spec, self._bound[0].inputs)
            return
        metrics: Sequence[MetricTerm] = ()
        if keras.tree.flatten([self.goal.metrics, self.goal.weighted_metrics]):
            outputs = outputs_of(self.model, input_spec, _TRIED_EXAMPLES)
            y = with_examples(label_spec, _TRIED_EXAMPLES)
            metrics = build_metrics(
                self.goal.metrics, self.goal.weighted_metrics, (), outputs.names, y, outputs.structure
            )
        by_name = {term.name: term.metric for term in metrics}

        def results(state: Sequence[Any]) -> dict[str, Any]:
            return additive_metrics.results(by_name, state)

        def evaluation(loss: Any, count: Any, state: Sequence[Any]) -> dict[str, Any]:
            return {"loss": float(loss / count), **results(state)}

        variables = additive_metrics.variables([*by_name.values()])
        totals = Totals(variables=variables, results=results, evaluation=evaluation, metrics=by_name)
        self._bound.append(_Bound(metrics, totals, label_spec, [input_spec]))

    @property
    def totals(self) -> Totals:
        """The sums beside the loss. Only after `bind`."""
        return self._bound[0].totals

    def __call__(
        self, params: Tensors, state: Tensors, batch: Batch, *, training: bool, scales: tf.Tensor | None = None
    ) -> ObjectiveSums:
        """See `Objective`.

        Raises:
          ConfigError: `compute_loss` does not return a scalar.
        """
        del scales  # the loss has one denominator
        x, y, weight = batch
        labels, sample_weight = _parts(y)

        def own_loss(outputs: Any) -> Any:
            return self.loss_of(x, y, outputs, training=training)

        call, loss = call_and_then(self.model, params, state, x, own_loss, training=training)
        count = tf.reduce_sum(weight)
        sums: Tensors = []
        flat_labels, flat = keras.tree.flatten(labels), keras.tree.flatten(call.outputs)
        weights = weight_of_each(sample_weight, len(flat_labels))
        for metric in self._bound[0].metrics:
            values = metric.sums(flat_labels[metric.y], flat[metric.outputs], weights[metric.y], weight)
            sums += [tf.cast(value, tf.float32) for value in values]
        return ObjectiveSums(tf.cast(loss, tf.float32) * count, count, call.state, sums)

    def loss_of(self, x: Any, y: Any, outputs: Any, *, training: bool) -> Any:
        """The result of `compute_loss` for outputs of the model.

        Raises:
          ConfigError: It is not a scalar.
        """
        labels, sample_weight = _parts(y)
        takes_training = "training" in inspect.signature(self.model.compute_loss).parameters
        options = {"training": training} if takes_training else {}
        loss = self.model.compute_loss(x, labels, outputs, sample_weight, **options)
        if loss is None or tf.convert_to_tensor(loss).shape.rank != 0:
            raise ConfigError(
                f"compute_loss of model {self.model.name!r} returned {loss!r}: it must return a scalar, the mean over "
                "the examples of the batch."
            )
        return loss


def _parts(y: Any) -> tuple[Any, Any]:
    """The labels, None without any, and their weights."""
    labels, sample_weight = y if isinstance(y, inputs.Weighted) else (y, None)
    return (None if isinstance(labels, tuple) and not labels else labels), sample_weight


def is_mean_over_examples(objective: OwnLossObjective, source: inputs.Source) -> bool:
    """Whether the loss of some examples is the mean of the losses of their two halves; tried on the first examples.

    Args:
      objective: The objective. The weights of its model must be whole on this device.
      source: The examples, at least one.
    """
    examples = min(_TRIED_EXAMPLES, source.info.num_examples)
    data = source.fetch(tf.range(examples, dtype=tf.int64))
    variables = objective.model.trainable_variables, objective.model.non_trainable_variables
    params, state = ([tf.convert_to_tensor(variable.value) for variable in each] for each in variables)

    def loss_of(start: int, stop: int) -> float:
        x, y = tf.nest.map_structure(lambda part: part[start:stop], data)
        return float(objective(params, state, (x, y, tf.ones([stop - start])), training=False).loss)

    cut = examples // 2
    parts = loss_of(0, cut) + loss_of(cut, examples) if cut else loss_of(0, examples)
    return bool(np.isclose(loss_of(0, examples), parts, rtol=1e-3, atol=1e-6))


def objective_of(model: keras.Model, goal: Goal | OwnGoal) -> Objective:
    """The objective of a model: the user's objective, its own `compute_loss`, or a loss of its outputs.

    Args:
      model: A built Keras model.
      goal: The goal that the user gave.
    """
    if isinstance(goal, OwnGoal):
        return goal.objective(model)
    if computes_own_loss(model):
        if goal.loss is not None:
            set_loss(model, goal.loss, goal.loss_weights)
        return OwnLossObjective(model, goal)
    return SupervisedObjective(model, goal)

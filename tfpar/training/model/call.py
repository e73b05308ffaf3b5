"""Calls any Keras model as a pure function, with the same results as the call inside `fit`.

`call_model` does what `Layer.stateless_call` (Keras 3.15) leaves out: it enters the model by `__call__`, so that masks,
dtypes and `training` reach nested layers, it takes a model whose `call` has no `training`, and it records the values
that the forward pass assigns to trainable weights and adds to the model's own metrics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.optim.keras_draws import current_draws, draw_state, is_reachable
from tfpar.parallel import weight_shards
from tfpar.parallel.held import held_by
from tfpar.parallel.split import split_of
from tfpar.parallel.tensor.obstacles import check_read
from tfpar.training.model.penalties import whole_penalties
from tfpar.training.model.random_ops import on_model_axis

import keras
import tensorflow as tf
from tensorflow.python.eager import record as tapes

Tensors = list[tf.Tensor]


class ModelCall(NamedTuple):
    """The result of a call of a model.

    Attributes:
      outputs: The model's outputs, in its structure.
      state: Values of `model.non_trainable_variables` after the call.
      losses: From `add_loss`, activity regularisers and weight regularisers; one value per micro-batch each.
    """

    outputs: Any
    state: Tensors
    losses: Tensors


@dataclasses.dataclass(eq=False)
class CallRecord:
    """The side effects of calls of a model. `recording` opens one; it must enclose the calls.

    Attributes:
      tape: Watches the values that the forward pass assigns to trainable weights; None if no gradient is computed.
      metrics: The model's own metrics, whose state the calls add to; see `own_metrics`.
      leaves: Index of a trainable variable, and a value that the forward pass assigned to it; in order.
      metric_sums: The amounts that the calls added to the state of `metrics`, flat; zeros before any call.
      outputs: The outputs of the last call, in the model's structure; None before any.
    """

    tape: tf.GradientTape | None = None
    metrics: Sequence[keras.metrics.Metric] = ()
    leaves: list[tuple[int, tf.Tensor]] = dataclasses.field(default_factory=list)
    metric_sums: Tensors = dataclasses.field(default_factory=list)
    outputs: Any = None

    @property
    def assigned(self) -> dict[int, tf.Tensor]:
        """The last value that was assigned to each trainable variable, by index; only variables that were assigned."""
        return dict(sorted(dict(self.leaves).items()))

    @property
    def float_sums(self) -> Tensors:
        """`metric_sums` as float32."""
        return [tf.cast(value, tf.float32) for value in self.metric_sums]

    def add_leaf(self, index: int, value: tf.Tensor) -> tf.Tensor:
        """Makes an assigned value a leaf of the tape.

        `fit` assigns to a variable, through which no gradient passes, and computes the gradient with respect to the
        variable: the sum over all values that the variable has had.
        """
        if self.tape is None:
            return value
        leaf = tf.stop_gradient(value)
        self.tape.watch(leaf)
        self.leaves.append((index, leaf))
        return leaf


class _Records(threading.local):
    """Open records of this thread, innermost last: MirroredStrategy traces every replica in a separate thread."""

    def __init__(self) -> None:
        self.open: list[CallRecord] = []


_records = _Records()


@contextlib.contextmanager
def recording(
    tape: tf.GradientTape | None = None, metrics: Sequence[keras.metrics.Metric] = ()
) -> Iterator[CallRecord]:
    """Records the side effects of `call_model` in this context; see `CallRecord`."""
    record = CallRecord(tape, metrics)
    record.metric_sums = [tf.zeros(variable.shape, variable.dtype) for variable in _state_of(metrics)]
    _records.open.append(record)
    try:
        yield record
    finally:
        _records.open.pop()


def call_model(model: keras.Model, params: Tensors, state: Tensors, x: Any, *, training: bool) -> ModelCall:
    """Calls a model on tensors, as `fit` and `evaluate` call it; no variable is read or assigned.

    Args:
      model: A built Keras model.
      params: Values of `model.trainable_variables`.
      state: Values of `model.non_trainable_variables`.
      x: Inputs of one micro-batch, in the structure that the model takes.
      training: Whether the model runs in training mode.

    Raises:
      ConfigError: A variable is assigned, or a loss added, inside a loop or branch of the model; or, in training, a
        variable of another owner is assigned.
    """
    call, _ = call_and_then(model, params, state, x, lambda outputs: None, training=training)
    return call


def call_and_then(
    model: keras.Model,
    params: Tensors,
    state: Tensors,
    x: Any,
    follow: Callable[[Any], Any],
    *,
    training: bool,
) -> tuple[ModelCall, Any]:
    """`call_model`, and a function of the outputs that sees the same values of the model's variables.

    Args:
      model: As for `call_model`.
      params: As for `call_model`.
      state: As for `call_model`.
      x: As for `call_model`.
      follow: `(outputs) -> result`, such as the model's own `compute_loss`.
      training: As for `call_model`.

    Returns:
      The call, with the state after `follow`, and the result of `follow`.

    Raises:
      ConfigError: As for `call_model`.
    """
    record = _records.open[-1] if _records.open else CallRecord()
    trainable, others = model.trainable_variables, model.non_trainable_variables
    sums = _state_of(record.metrics)
    given = list(zip(trainable, params, strict=True))
    mapping = [
        *((variable, value) for variable, value in given if not _in_part(variable)),
        *((variable, value) for variable, value in zip(others, state, strict=True) if not _in_part(variable)),
        *zip(sums, record.metric_sums or [variable.value for variable in sums], strict=True),
    ]
    draws, draw = current_draws(), draw_state()
    with (
        keras_calls.drawing_from(draws),
        _CallScope([*mapping, (draw, draws.settled(draws.outside))], trainable, record) as scope,
        keras_internals.unscaled_losses(),
        weight_shards.shown_gathered(model.variables),
    ):
        # Not given to the constructor, which would compare shapes: a value is a part of its variable, or all of it
        # where the model is called as a whole.
        every = [*given, *zip(others, state, strict=True)]
        scope.state_mapping.update({id(variable): value for variable, value in every if _in_part(variable)})
        with on_model_axis(f"model {model.name!r}"):
            outputs = model(x, training=training) if keras_internals.takes_training(model) else model(x)
        record.outputs = outputs
        scope.check_assigned()
        with whole_penalties(model):
            losses = _each_once(model.losses)
            _check_losses(model, losses)
            result = follow(outputs)
    draws.outside = scope.kept_value(draw)
    record.metric_sums = [_outside(scope, variable, None) for variable in sums]
    new_state = [_outside(scope, variable, value) for variable, value in zip(others, state, strict=True)]
    for index, _ in record.leaves:
        _outside(scope, trainable[index], None)
    return ModelCall(outputs, new_state, losses), result


def _each_once(losses: Sequence[Any]) -> list[Any]:
    """The losses without those that several layers list, see `Layer._loss_ids` of Keras 3.15: a layer, and the model
    for a stage of it; or a layer that added one with the same `id` in an earlier trace."""
    return [*{id(loss): loss for loss in losses}.values()]


def _in_part(variable: keras.Variable) -> bool:
    return bool(split_of(variable) or held_by(variable))


def watch(tensor: tf.Tensor) -> tf.Tensor:
    """Marks a tensor from elsewhere, so that its gradient is computed too, if gradients are computed at all."""
    if _records.open and (tape := _records.open[-1].tape) is not None:
        tape.watch(tensor)
    return tensor


def is_watched(tensor: tf.Tensor) -> bool:
    """Whether an open tape would compute the gradient of a tensor, or of what it was computed from."""
    return bool(tapes.should_record_backprop([tensor]))


def check_agreement(
    model: keras.Model, record: CallRecord, roots: Sequence[tf.Tensor], before: Tensors, after: Tensors
) -> None:
    """Refuses a forward pass that assigns different values to a trainable weight on different replicas.

    Every replica assigns its own value, so the value may depend only on weights, and on state that depends only on
    weights.

    Args:
      model: The model.
      record: The record of its call.
      roots: The tensors that differ between replicas: examples and seed.
      before: The model's state before the call.
      after: The model's state after the call.

    Raises:
      ConfigError: With the weight's name.
    """
    if not record.leaves or tf.executing_eagerly():
        return
    differing = {tensor.ref() for tensor in roots}
    while True:
        found = [old.ref() for old, new in zip(before, after, strict=True) if depends_on(new, differing)]
        if differing.issuperset(found):
            break
        differing.update(found)
    for index, leaf in record.leaves:
        if depends_on(leaf, differing):
            raise ConfigError(
                f"the model assigns its trainable weight {model.trainable_variables[index].path!r} a value that "
                "depends on the examples, so the replicas would get different weights. Train on one device "
                "(--strategy=one_device), or create it with trainable=False: replicas average such state."
            )


def depends_on(tensor: tf.Tensor, roots: set[Any]) -> bool:
    """Whether a tensor is computed from any of `roots`, all in one graph."""
    seen, left = set(), [tensor]
    while left:
        current = left.pop()
        if current.ref() in roots:
            return True
        if current.ref() not in seen:
            seen.add(current.ref())
            left += current.op.inputs
    return False


class _CallScope(keras.StatelessScope):
    """Makes values that the forward pass assigns to trainable weights leaves of the record's tape."""

    def __init__(
        self, mapping: list[tuple[keras.Variable, Any]], trainable: Sequence[keras.Variable], record: CallRecord
    ) -> None:
        super().__init__(state_mapping=mapping, collect_losses=True)
        self._known, self._lost = {id(variable) for variable, _ in mapping}, list[keras.Variable]()
        self._index = {id(variable): index for index, variable in enumerate(trainable)}
        self._record = record
        self._gathered = weight_shards.Gathered()

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        check_read(variable)
        return self._gathered.of(variable, self.kept_value(variable))

    def kept_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """The value that a replica keeps, which may be a shard."""
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if id(variable) not in self._known and not _in_part(variable):
            self._lost.append(variable)
        index = self._index.get(id(variable))
        super().add_update((variable, value if index is None else self._record.add_leaf(index, value)))

    def check_assigned(self) -> None:
        """Refuses a forward pass of training that has assigned a variable which is not the model's.

        Raises:
          ConfigError: With the variable's name.
        """
        if self._lost and self._record.tape is not None:
            raise ConfigError(
                f"the model assigns the variable {self._lost[0].path!r}, which is of none of its layers, so the value "
                "would be lost. Make its owner (a SeedGenerator, a metric, a layer) an attribute of a layer, or create "
                "it with add_weight; or train the model with its own fit and tfpar.DistributedOptimizer."
            )


def _outside(scope: _CallScope, variable: keras.Variable, given: tf.Tensor | None) -> tf.Tensor:
    """The value of a variable after the call.

    Args:
      scope: The scope of the call.
      variable: The variable.
      given: Its value before the call. A seed state keeps this value, because every step derives it again.

    Raises:
      ConfigError: It was assigned inside a loop or branch, whose tensors exist only there.
    """
    value = scope.kept_value(variable)
    if tf.executing_eagerly() or is_reachable(value):
        return value
    if given is not None and keras_internals.is_seed_state(variable):
        return given
    raise ConfigError(
        f"the model assigns its variable {variable.path!r} inside a loop, a branch or a nested function (tf.cond, "
        "tf.while_loop, tf.function), from which no value can be returned. Compute the value there and assign it "
        "outside, or train the model with its own fit and tfpar.DistributedOptimizer."
    )


def _check_losses(model: keras.Model, losses: Sequence[tf.Tensor]) -> None:
    """Refuses losses that exist only within a loop or branch.

    Raises:
      ConfigError: With the name of the layer.
    """
    for loss in losses:
        if not is_reachable(loss):
            adding = (layer for layer in keras_internals.all_layers(model) if keras_calls.has_added(layer, loss))
            raise ConfigError(
                f"layer {next(adding, model).name!r} adds a loss (add_loss) inside a loop, a branch or a nested "
                "function (tf.cond, tf.while_loop, tf.function), from which no value can be returned. Compute the "
                "value there and add it outside (a call needs no tf.function), or train the model with its own fit and "
                "tfpar.DistributedOptimizer."
            )


def _state_of(metrics: Sequence[keras.metrics.Metric]) -> list[keras.Variable]:
    return [variable for metric in metrics for variable in metric.variables]

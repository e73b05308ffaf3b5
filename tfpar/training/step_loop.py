"""Any number of training steps in one call from Python, as a loop on the device.

`run_steps` is the loop. It uses only the operations that `Step` lists, and does not depend on gradients, exchange or
optimizer.

Shapes: n is the number of steps of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from tfpar.monitor import timings
from tfpar.parallel.compilation import CompilationPlan
from tfpar.precision import LossScale
from tfpar.training import sidecar
from tfpar.training.norms import sum_of_squares
from tfpar.training.objective import Tensors
from tfpar.training.sidecar import Sidecar

import tensorflow as tf


class Norms(NamedTuple):
    """L2 norms over all trainable weights, float32 scalars; that of the gradient is taken before clipping.

    They have no meaning if the call was not asked for norms.
    """

    gradient: tf.Tensor
    parameter: tf.Tensor
    update: tf.Tensor


class StepsResult(NamedTuple):
    """The report of several steps.

    Attributes:
      loss: Float32 `[n]`: mean loss over the examples of each step, or over its positions; NaN if it has no examples.
      count: Float32 `[n]`: examples of each step.
      finite: Bool `[n]`: whether the step was applied: all replicas were finite, and there were examples. Also true
        if a mask left out all positions of the examples, although nothing was applied: the loss is then 0, as in Keras.
      durations: Float64 `[n, 6]`, seconds: see `timings.COLUMNS`. All zero if the step is not timed.
      metrics: Metric state summed over the steps.
      loss_counts: Float32 `[n]`: the examples, or positions, over which the main term of each step's loss is averaged.
      norms: Norms at the last step.
      learning_rate: Float32 scalar: of the last step.
      loss_scale: The loss scale after the last step.
    """

    loss: tf.Tensor
    count: tf.Tensor
    finite: tf.Tensor
    durations: tf.Tensor
    metrics: Tensors
    loss_counts: tf.Tensor
    norms: Norms
    learning_rate: tf.Tensor
    loss_scale: LossScale


class StepReport(NamedTuple):
    """The report of one step, the same on every replica.

    Attributes:
      sums: Float32 `[1 + report_length]`: norm of the mean gradient, and the front of the summed sidecar.
      loss_scale: The loss scale for the next step.
      times: When the first early gradient, all gradients, the exchange and the update were done: float64 scalars,
        seconds. Empty if a step has no clock.
    """

    sums: tf.Tensor
    loss_scale: LossScale
    times: tuple[tf.Tensor, ...]


class Step(Protocol):
    """The operations of a training step that the loop uses."""

    sidecar: Sidecar
    plan: CompilationPlan

    def run_on_replicas(
        self, batch: Any, step: tf.Tensor, lr_multiplier: tf.Tensor, loss_scale: LossScale, wants_norm: tf.Tensor
    ) -> StepReport:
        """One step on every replica, with four times; the last of them is when the last replica is done."""

    def next_batch(self, iterator: Iterator[Any]) -> Any:
        """The next batch for the replicas of this process."""

    def counted_weights(self) -> Tensors:
        """The values of the trainable weights that this process counts in their norm."""

    def sum_over_parts(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of a float64 scalar over the processes that count different weights."""

    def learning_rate(self, step: tf.Tensor, lr_multiplier: tf.Tensor) -> tf.Tensor:
        """The learning rate of a step, float32 scalar."""

    def local_tensors(self, batch: Any) -> Tensors:
        """The tensors of a distributed batch on all devices of this process."""

    def clock(self, after: list[Any]) -> tf.Tensor:
        """Time in seconds, float64 scalar, once everything in `after` exists; 0 if the step is not timed."""


class _LoopState(NamedTuple):
    """The values that one step of the loop passes to the next; times in seconds.

    Attributes:
      batch: The batch of the next step; `()` if it is fetched between steps.
      batch_ready: When that batch was ready.
      done: When the previous step was done. What depends on it runs after that step.
      sums: `StepReport.sums` of the steps so far.
      stamps: Times of the steps so far, five each: batch, and `StepReport.times`.
      loss_scale: The loss scale of the next step.
    """

    batch: Any
    batch_ready: tf.Tensor
    done: tf.Tensor
    sums: tf.TensorArray
    stamps: tf.TensorArray
    loss_scale: LossScale


def run_steps(
    step: Step,
    iterator: Iterator[Any],
    first_step: tf.Tensor,
    steps: tf.Tensor,
    loss_scale: LossScale,
    lr_multiplier: tf.Tensor,
    wants_norms: tf.Tensor | bool = True,
) -> StepsResult:
    """Runs `steps` training steps. To be called inside a `tf.function`.

    Args:
      step: The step.
      iterator: Distributed iterator over elements `(x, y, weight)`, see `tfpar.inputs.Pipeline.dataset`.
      first_step: Int64 scalar: number of the first step; seeds and schedule depend on it.
      steps: Int32 scalar: steps to run, at least 1.
      loss_scale: The loss scale to start with.
      lr_multiplier: Float32 scalar that the scheduled learning rate is multiplied by.
      wants_norms: Bool scalar: whether to compute the norms at the last step. They take several passes over all
        weights, and a copy of them.
    """
    prefetches, wanted = step.plan.prefetches_in_loop, tf.convert_to_tensor(wants_norms)
    began = step.clock([])

    def body(index: tf.Tensor, state: _LoopState, is_last: tf.Tensor) -> _LoopState:
        if prefetches:
            batch, batch_ready = state.batch, state.batch_ready
            next_batch = tf.cond(index + 1 < steps, lambda: step.next_batch(iterator), lambda: batch)
            next_batch_ready = step.clock(step.local_tensors(next_batch))
        else:
            batch, next_batch = step.next_batch(iterator), ()
            batch_ready = next_batch_ready = step.clock(step.local_tensors(batch))
        with tf.control_dependencies([state.done]):
            number = first_step + tf.cast(index, tf.int64)
            report = step.run_on_replicas(batch, number, lr_multiplier, state.loss_scale, is_last & wanted)
        return _LoopState(
            next_batch,
            next_batch_ready,
            report.times[-1],
            state.sums.write(index, report.sums),
            state.stamps.write(index, tf.stack([batch_ready, *report.times])),
            report.loss_scale,
        )

    batch = step.next_batch(iterator) if prefetches else ()
    start = _LoopState(
        batch,
        step.clock(step.local_tensors(batch)),
        began,
        tf.TensorArray(tf.float32, size=steps, element_shape=[1 + step.sidecar.report_length]),
        tf.TensorArray(tf.float64, size=steps, element_shape=[5]),
        loss_scale,
    )
    weights_before, state = while_in_two_parts(steps, body, step.counted_weights, start, wanted)
    last_step = first_step + tf.cast(steps - 1, tf.int64)
    with tf.control_dependencies([state.done]):
        nothing = tf.zeros([], tf.float64)
        squares = tf.cond(wanted, lambda: _squares(step, weights_before), lambda: (nothing, nothing))
    return _result(step, state, began, squares, step.learning_rate(last_step, lr_multiplier))


def _squares(step: Step, weights_before: Tensors) -> tuple[tf.Tensor, tf.Tensor]:
    """The squared norms of the weights that this process counts, and of their last change: float64 scalars."""
    weights = step.counted_weights()  # outside XLA: inside, the old weights would have to be copied
    changed = sum_of_squares(weights, weights_before)
    with tf.control_dependencies([changed]):
        return sum_of_squares(weights), changed


def _result(
    step: Step,
    state: _LoopState,
    began: tf.Tensor,
    squares: tuple[tf.Tensor, tf.Tensor],
    learning_rate: tf.Tensor,
) -> StepsResult:
    """The report of the steps, from the state after the last of them and the result of `_squares`."""
    # On all workers and in no branch: it may be a collective call.
    parameter_norm, update_norm = (tf.cast(tf.sqrt(step.sum_over_parts(each)), tf.float32) for each in squares)
    table = state.sums.stack()
    gradient_norm, sums = table[:, 0], table[:, 1:]
    count = sums[:, sidecar.COUNT]
    return StepsResult(
        loss=_losses(sums, step.sidecar.denominator),
        count=count,
        finite=tf.equal(sums[:, sidecar.NON_FINITE], 0.0) & (count > 0.0),
        durations=timings.durations(began, state.stamps.stack()),
        metrics=step.sidecar.metrics(sums),
        loss_counts=sums[:, step.sidecar.loss_count],
        norms=Norms(gradient_norm[-1], parameter_norm, update_norm),
        learning_rate=learning_rate,
        loss_scale=state.loss_scale,
    )


def _losses(sums: tf.Tensor, denominator: int) -> tf.Tensor:
    """The mean loss of each step from the fronts of the summed sidecars `[n, report_length]`."""
    loss, count = sums[:, sidecar.LOSS], sums[:, sidecar.COUNT]
    if denominator == sidecar.COUNT:
        return loss / count
    # Examples without a counted position have a loss of 0, as in Keras; divide_no_nan would also make 0 of NaN.
    has_loss = (count > 0.0) & ~tf.math.is_nan(loss)
    return tf.where(has_loss, tf.math.divide_no_nan(loss, sums[:, denominator]), float("nan"))


def while_in_two_parts(
    turns: tf.Tensor,
    body: Callable[[tf.Tensor, Any, tf.Tensor], Any],
    snapshot: Callable[[], Tensors],
    start: Any,
    wanted: tf.Tensor,
) -> tuple[Tensors, Any]:
    """Runs `body` `turns` times and takes a snapshot before the last turn, if one is wanted.

    Why not a plain loop of `turns - 1` followed by one more `body`: that would trace `body` twice, and the step of many
    replicas takes seconds to trace. Why not a plain loop with a branch on the last turn: the loop would carry the
    snapshot, and what a branch reads is kept from every turn to the next, taken or not. So there is a loop over two
    parts, and in it a loop over the turns of the part: the first part has all turns but the last and ends with the
    snapshot, the second has the last.

    Args:
      turns: Int32 scalar, at least 1.
      body: `(index, state, is_last) -> state`: int32 scalar, loop state, bool scalar.
      snapshot: Returns the values of variables that `body` changes. They are not copied: TensorFlow keeps the memory
        of a value that is in use, and gives the variable other memory.
      start: The state before the first turn: a NamedTuple with a tensor `done`, which exists once the previous turn has
        had all its effects.

    Returns:
      The snapshot, and the state after the last turn.
    """

    def run_part(part: tf.Tensor, index: tf.Tensor, taken: Tensors, state: Any) -> tuple[Any, ...]:
        is_last = tf.equal(part, 1)
        stop = tf.where(is_last, turns, turns - 1)
        index, state = tf.while_loop(
            lambda index, _: index < stop,
            lambda index, state: (index + 1, body(index, state, is_last)),
            (index, state),
        )
        # Control dependencies are the only order between reading a variable and the turns: after the first part, before
        # the second.
        with tf.control_dependencies([state.done]):
            taken = tf.cond(is_last | ~wanted, lambda: taken, snapshot)
        with tf.control_dependencies(taken):
            state = state._replace(done=tf.identity(state.done))
        return part + 1, index, taken, state

    values = snapshot()  # only their types and ranks are used
    nothing = [tf.zeros([0] * value.shape.rank, value.dtype) for value in values]
    first = (tf.constant(0), tf.constant(0), nothing, start)
    of_values = [tf.TensorShape([None] * value.shape.rank) for value in values]
    shapes = (None, None, of_values, tf.nest.map_structure(lambda _: None, start))
    *_, taken, state = tf.while_loop(lambda part, *_: part < 2, run_part, first, shape_invariants=shapes)
    return taken, state

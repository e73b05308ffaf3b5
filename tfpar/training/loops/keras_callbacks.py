"""Keras callbacks, run through one hook with the logs that Keras would give them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.cluster import failure
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError
from tfpar.optim import keras_internals, keras_rates
from tfpar.parallel.topology import Topology
from tfpar.training.evaluation import BatchCalls
from tfpar.training.loops.history import evaluation_logs
from tfpar.training.loops.hooks import Hook
from tfpar.training.loops.state import LoopState, MetricResults, RunningResults
from tfpar.training.program import Program

import keras
import numpy as np

_TRAIN_BATCH = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_TEST_BATCH = ("on_test_batch_begin", "on_test_batch_end")
_PREDICT_BATCH = ("on_predict_batch_begin", "on_predict_batch_end")
# They write one file for the whole run.
_CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_INSTEAD = {
    keras.callbacks.BackupAndRestore: "--workdir keeps checkpoints that a run resumes from",
    keras.callbacks.SwapEMAWeights: "--ema keeps moving averages, and evaluates and exports them",
}


class KerasCallbacks:
    """Runs Keras callbacks at the ends of epochs, and of batches if one of them overrides a batch method, as `fit`
    does.

    An epoch is a pass over the training examples; the end of the run ends the last one, complete or not. Its logs are
    `loss` and metrics over its examples and, if an evaluation was made at that step, those of the validation with the
    prefix `val_`. In an epoch that was resumed midway, `loss` and metrics cover only the steps since the resume.

    - Batch methods are called for every batch, which costs a call from Python for each batch, so they are called only
      if a callback overrides one of them. They get the logs of the epoch so far, as in Keras. For the batch methods of
      an evaluation, its results are also summed over the workers after each batch.
    - `model.stop_training = True` on any worker ends the run on all of them. Within an epoch, an evaluation and
      `on_epoch_end` follow.
    - `model.optimizer.learning_rate` shows the current rate. If a schedule of tfpar determines it, a callback that sets
      it rescales the schedule from then on.
    - Test methods are called around each evaluation.
    - Callbacks run on every worker, and print (`verbose=1`) on the chief only; `CSVLogger`, `ModelCheckpoint`,
      `RemoteMonitor` and `TensorBoard` run on the chief.
    - Under `parameter_server` training waits for each evaluation, and batch methods are refused.

    Args:
      callbacks: Keras callbacks.
      program: The program to train.
      steps_per_epoch: Steps of one pass over the examples.
      total: Steps of the whole run.
      current_rate: Scheduled learning rate at a step, or None where the optimizer keeps its own.
      metric_results: Metrics by name from their summed states.

    Raises:
      ConfigError: Something that is not a callback, or a callback that cannot work here.

    Attributes:
      ends_of_batches: The row for the end of a step, before an evaluation; empty if no callback has methods for
        training batches.
      ends_of_epochs: The row for the end of an epoch, after everything else at a step, and for the start of the next.
      logs: The logs of ended epochs by their numbers, with what callbacks have added, such as a learning rate.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        program: Program,
        *,
        steps_per_epoch: int,
        total: int,
        current_rate: Callable[[int], float] | None,
        metric_results: MetricResults,
    ) -> None:
        check_callbacks(callbacks, program.topology, program.config.train.shard)
        self._program = program
        self._steps_per_epoch = steps_per_epoch
        self._current_rate = current_rate
        self._metric_results = metric_results
        self._epoch = RunningResults(metric_results)
        self._compiled_with = vars(program.model).get("optimizer")
        self._shown = np.float32(0.0)
        self._active = False
        self._until_end = contextlib.ExitStack()
        self._directed: list[Any] = []
        self.logs: dict[int, dict[str, Any]] = {}
        # Last, like Keras' own `History`, so that it sees the values that the others have written into the logs.
        recording = keras.callbacks.LambdaCallback(on_epoch_end=self.logs.__setitem__)
        self._callbacks = _callback_list(
            [*callbacks, recording], program, epochs=math.ceil(total / steps_per_epoch), steps=steps_per_epoch
        )
        self._test_batches = _test_batches(callbacks, self._callbacks, program)
        self._per_batch = any(_wants(one, _TRAIN_BATCH) for one in callbacks)  # on every worker alike
        self.ends_of_batches = [Hook(1, self._end_batch)] if self._per_batch else []
        every = 1 if self._per_batch else steps_per_epoch
        self.ends_of_epochs = [Hook(every, self._end_epoch, also=lambda state: state.ending)]

    def begin(self, state: LoopState) -> LoopState:
        """Starts training: `on_train_begin`, and the start of the current epoch."""
        model = self._program.model
        model.stop_training = False
        self._active = True
        self._until_end.enter_context(_quiet_but_on_chief(self._callbacks.callbacks, self._program.topology))
        self._choose_directions()
        # As `compile` does, so that callbacks find it; without Keras' tracking, so that it can be removed again.
        vars(model)["optimizer"] = self._program.optimizer
        self._show_rate(state)
        self._callbacks.on_train_begin()
        self._begin_epoch(state)
        return self._stopped(self._with_rate(state), False)

    def end(self, state: LoopState) -> None:
        """Ends training: `on_train_end`."""
        self._callbacks.on_train_end(self._epoch_logs(state))
        self.release()

    @property
    def tests_batches(self) -> bool:
        """Whether a callback has methods for the batches of an evaluation."""
        return self._test_batches is not None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[tuple[BatchCalls | None, Callable[[Mapping[str, Any]], None]]]:
        """The calls around each batch of an evaluation of the run, and the receiver of its results."""
        if not self._active:  # after `on_train_end`, for weights that a callback has restored
            yield None, lambda results: None
            return
        self._callbacks.on_test_begin()
        yield self._test_batches, lambda results: self._callbacks.on_test_end(_logs(results))

    def release(self) -> None:
        """Removes from the model the attributes that only callbacks need; even if training fails."""
        self._active = False
        self._until_end.close()
        for callback in self._directed:
            callback.mode = "auto"
        self._directed.clear()
        attributes = vars(self._program.model)
        attributes.pop("optimizer", None)
        if self._compiled_with is not None:
            attributes["optimizer"] = self._compiled_with

    def _choose_directions(self) -> None:
        """Tells callbacks that monitor a metric whether more of it is better: Keras looks at metrics of `compile`."""
        core = self._program.core
        metrics = {**{metric.name: metric for metric in core.model_metrics}, **core.objective.totals.metrics}
        for callback in self._callbacks.callbacks:
            monitored = getattr(callback, "monitor", None)
            if isinstance(monitored, str) and getattr(callback, "mode", None) == "auto":
                metric = metrics.get(monitored.removeprefix("val_"))
                if metric is not None and (direction := keras_internals.direction_of(metric)):
                    callback.mode = direction
                    self._directed.append(callback)

    def _end_batch(self, state: LoopState) -> LoopState:
        self._epoch.add(state.since)
        self._show_rate(state)
        batch = (state.step - 1) % self._steps_per_epoch
        self._callbacks.on_train_batch_end(batch, self._epoch.results())
        return self._stopped(self._with_rate(state), state.stop)

    def _end_epoch(self, state: LoopState) -> LoopState:
        if not self._per_batch:
            self._epoch.add(state.since)
        self._show_rate(state)
        ended = state.step % self._steps_per_epoch == 0
        if ended or state.finished:
            self._callbacks.on_epoch_end((state.step - 1) // self._steps_per_epoch, self._epoch_logs(state))
        state = self._stopped(self._with_rate(state), state.stop)
        if state.ending or state.stop:
            return state
        if ended:
            self._begin_epoch(state)
        elif self._per_batch:
            self._callbacks.on_train_batch_begin(state.step % self._steps_per_epoch)
        # As in Keras, a stop that is set before a batch takes effect after it, if batch methods are called.
        return self._with_rate(state if self._per_batch else self._stopped(state, state.stop))

    def _stopped(self, state: LoopState, stop: bool) -> LoopState:
        """The state, with `stop` if a callback has set `stop_training`."""
        if not self._program.model.stop_training:
            return state.replace(stop=stop)
        # Keras does not record which callback set it, but some of Keras' own callbacks record the epoch.
        names = [type(one).__name__ for one in self._callbacks.callbacks if getattr(one, "stopped_epoch", 0)]
        by = f"the callback {', '.join(names)}" if names else "a Keras callback"
        return state.replace(stop=True, stopped_by=by)

    def _begin_epoch(self, state: LoopState) -> None:
        self._epoch = RunningResults(self._metric_results)
        epoch, batch = divmod(state.step, self._steps_per_epoch)
        if batch:
            self._begin_again(epoch)
        else:
            self._callbacks.on_epoch_begin(epoch)
        if self._per_batch:
            self._callbacks.on_train_batch_begin(batch)

    def _begin_again(self, epoch: int) -> None:
        """Begins the epoch in which a run resumes, at the rate that callbacks have already given it: those that change
        the rate relative to the previous one would do so twice. A schedule or function is none of theirs."""
        optimizer = self._program.optimizer
        resumed = keras_rates.assigned_rate(optimizer)
        self._callbacks.on_epoch_begin(epoch)
        if resumed is not None and keras_rates.assigned_rate(optimizer) != resumed:
            optimizer.learning_rate = resumed

    def _epoch_logs(self, state: LoopState) -> dict[str, Any]:
        return self._epoch.results() | evaluation_logs(state)

    def _show_rate(self, state: LoopState) -> None:
        """Sets the optimizer's learning rate to the one in use, for callbacks to read."""
        if self._current_rate is not None:
            self._shown = np.float32(self._current_rate(state.step) * state.lr_multiplier)
            self._program.optimizer.learning_rate = self._shown

    def _with_rate(self, state: LoopState) -> LoopState:
        """The state, with a learning rate that a callback has set."""
        if self._current_rate is None:
            return state  # the step reads the optimizer's own rate
        rate, scheduled = np.float32(self._program.optimizer.learning_rate.numpy()), self._current_rate(state.step)
        if rate == self._shown or not scheduled:
            return state
        self._shown = rate
        if not (np.isfinite(rate) and rate >= 0):
            raise ConfigError(
                f"a Keras callback set the learning rate to {rate:g} after step {state.step}. Set a finite rate, 0 or "
                "more."
            )
        # Not relative to the rate before, which a callback may have set to 0.
        return state.replace(lr_multiplier=float(rate) / scheduled)


def check_callbacks(callbacks: Any, topology: Topology, shard: str = "none") -> list[keras.callbacks.Callback]:
    """The callbacks that were given to a method; refuses those that cannot work.

    Args:
      callbacks: As Keras' methods take them: one, a structure of several, or None.
      topology: The topology of the run.
      shard: Its `--shard`.

    Raises:
      ConfigError: With what to use instead.
    """
    divides = "--mesh" if topology.mesh.devices_of_replica > 1 else "--shard=weights" if shard == "weights" else ""
    flat = [] if callbacks is None else keras.tree.flatten(callbacks)
    for one in flat:
        name = type(one).__name__
        if not isinstance(one, keras.callbacks.Callback):
            raise ConfigError(f"callbacks=...: expected Keras callbacks, got {one!r}. For a function use hooks=.")
        for kind, instead in _INSTEAD.items():
            if isinstance(one, kind):
                raise ConfigError(f"callbacks=...: {name} is not supported; {instead}.")
        if divides and isinstance(one, keras.callbacks.ModelCheckpoint):
            raise ConfigError(
                f"callbacks=...: {name} would save parts of the weights, which {divides} divides. --workdir keeps "
                "checkpoints, and model.keras, of the whole model."
            )
        if not topology.synchronous and _wants(one, (*_TRAIN_BATCH, *_TEST_BATCH)):
            raise ConfigError(
                f"callbacks=...: {name} has a method for every batch, which --strategy=parameter_server cannot "
                "call: its workers train without waiting for each other. Use epoch methods, or another strategy."
            )
    return flat


@contextlib.contextmanager
def testing(
    callbacks: Sequence[keras.callbacks.Callback], program: Program
) -> Iterator[tuple[BatchCalls | None, Callable[[Mapping[str, Any]], None]]]:
    """A separate evaluation, as by `Trainer.evaluate`; see `KerasCallbacks.evaluating`. All workers call it together,
    with callbacks or without.

    Raises:
      ConfigError: Only some workers have callbacks with methods for batches.
    """
    listed = _callback_list(callbacks, program)
    _agree_on_batches(any(_wants(one, _TEST_BATCH) for one in callbacks), program, "evaluate")
    with _quiet_but_on_chief(listed.callbacks, program.topology):
        listed.on_test_begin()
        yield _test_batches(callbacks, listed, program), lambda results: listed.on_test_end(_logs(results))


@contextlib.contextmanager
def predicting(callbacks: Sequence[keras.callbacks.Callback], program: Program) -> Iterator[BatchCalls | None]:
    """The calls around each batch of a prediction. All workers call it together, with callbacks or without.

    Raises:
      ConfigError: Only some workers have callbacks with methods for batches.
    """
    listed, model = _callback_list(callbacks, program), program.model
    wanted = any(_wants(one, _PREDICT_BATCH) for one in callbacks)
    _agree_on_batches(wanted, program, "predict")
    model.stop_predicting = False
    calls = BatchCalls(
        listed.on_predict_batch_begin, listed.on_predict_batch_end, stop=lambda: bool(model.stop_predicting)
    )
    with _quiet_but_on_chief(listed.callbacks, program.topology):
        listed.on_predict_begin()
        yield calls if wanted else None
        listed.on_predict_end()


def _agree_on_batches(wanted: bool, program: Program, method: str) -> None:
    topology = program.topology
    agreement = WorkerAgreement(world_group(topology.workers, topology.worker), f"{method}()")
    with failure.peer_errors_named(topology.cluster):
        check_batch_methods(method, agreement.gather(wanted))


def check_batch_methods(method: str, wanted: Sequence[bool]) -> None:
    """Refuses workers of which only some call methods for the batches of an evaluation or a prediction: these meet the
    others after each batch, and would take their sums for those of one.

    Args:
      method: The method of `Trainer` that got the callbacks.
      wanted: By worker, whether it has such callbacks.

    Raises:
      ConfigError: Names the workers that have them.
    """
    if len(set(wanted)) == 1:
        return
    ranks = ", ".join(str(rank) for rank, wants in enumerate(wanted) if wants)
    raise ConfigError(
        f"{method}(callbacks=...): only worker {ranks} has callbacks with methods for the batches of an evaluation or "
        "prediction. Give every worker the same; where only the chief is to act, return from the method on the others."
    )


def _test_batches(
    callbacks: Sequence[keras.callbacks.Callback], listed: keras.callbacks.CallbackList, program: Program
) -> BatchCalls | None:
    """The calls around each batch of an evaluation, on every worker, if any callback has a method for them."""
    if not any(_wants(one, _TEST_BATCH) for one in callbacks):
        return None
    model = program.model

    def begin(batch: int) -> None:
        if batch == 0:
            model.stop_evaluating = False
        listed.on_test_batch_begin(batch)

    return BatchCalls(begin, listed.on_test_batch_end, stop=lambda: bool(model.stop_evaluating))


def _callback_list(
    callbacks: Sequence[keras.callbacks.Callback], program: Program, **params: int
) -> keras.callbacks.CallbackList:
    """The callbacks that run in this process."""
    chosen = [one for one in callbacks if program.topology.is_chief or not isinstance(one, _CHIEF_ONLY)]
    return keras.callbacks.CallbackList(
        chosen, add_history=False, add_progbar=False, model=program.model, verbose=0, **params
    )


@contextlib.contextmanager
def _quiet_but_on_chief(callbacks: Sequence[keras.callbacks.Callback], topology: Topology) -> Iterator[None]:
    """Keeps callbacks from printing on workers other than the chief."""
    silenced = [] if topology.is_chief else [(one, one.verbose) for one in callbacks if getattr(one, "verbose", 0)]
    for callback, _ in silenced:
        callback.verbose = 0
    try:
        yield
    finally:
        for callback, verbose in silenced:
            callback.verbose = verbose


def _logs(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results of an evaluation, in the form of Keras' logs."""
    return {name: value for name, value in results.items() if name != "examples"}


def _wants(callback: keras.callbacks.Callback, methods: Sequence[str]) -> bool:
    """Whether a callback does something in one of these batch methods."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
        return False  # overrides the method without doing anything
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(base, name) for name in methods)

"""The actions between steps: rows of one list, each with its interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.training.loops.pacing import next_multiple
from tfpar.training.loops.state import Interval, LoopState, MetricResults

import numpy as np


def _never(_: LoopState) -> bool:
    return False


def _nothing(_: LoopState) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Hook:
    """Something that a training loop does between two steps.

    The loop stops at every multiple of `every`, on all workers, and calls `run` on every worker. At that moment the
    model's weights are current and no step is running. Hooks run in the order of their list. If an evaluation or a
    checkpoint is due at the same step, they run after the evaluation and before the checkpoint, so that the checkpoint
    contains their changes.

    ```python
    def report(state: tfpar.LoopState) -> None:
        print(state.step, state.since.results()["loss"], state.results.get("accuracy"))

    def stop_early(state: tfpar.LoopState) -> tfpar.LoopState | None:
        return state.replace(stop=True) if state.results.get("loss", 1.0) < 0.1 else None

    trainer.fit(train, epochs=10, validation=test, hooks=[tfpar.Hook(100, report), tfpar.Hook(500, stop_early)])
    ```

    Attributes:
      every: The interval in steps, at least 1.
      run: Takes the state; returns the state with which to continue, or None for no change. Only changes of `stop`,
        `stopped_by` and `lr_multiplier` have an effect.
      also: Whether to run at a stop that is not a multiple of `every`, such as the last one: `lambda state:
        state.ending`. It must give the same answer on every worker.
      at_end: Called with the state after the last stop of this start, whichever hook or callback has made it the last.
        `run` may have been called there before that was known. `since` is empty.

    Raises:
      ConfigError: `every` is not a positive integer, or `run` or `at_end` cannot be called.
    """

    every: int
    run: Callable[[LoopState], LoopState | None]
    also: Callable[[LoopState], bool] = _never
    at_end: Callable[[LoopState], None] = _nothing

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int | np.integer) or self.every < 1:
            raise ConfigError(f"Hook(every={self.every!r}): give the number of steps between its runs, at least 1.")
        if not callable(self.run):
            raise ConfigError(f"Hook(run={self.run!r}): give a function that takes a tfpar.LoopState.")
        if not callable(self.at_end):
            raise ConfigError(f"Hook(at_end={self.at_end!r}): give a function that takes a tfpar.LoopState.")
        object.__setattr__(self, "every", int(self.every))

    def is_due(self, state: LoopState) -> bool:
        """Whether it runs at this stop."""
        return state.step % self.every == 0 or self.also(state)


def check_hooks(hooks: Sequence[Hook] | Hook | None) -> tuple[Hook, ...]:
    """The hooks that were given to `fit` (several, one or None) as a tuple.

    Raises:
      ConfigError: One of them is not a hook.
    """
    given = () if hooks is None else tuple(hooks) if isinstance(hooks, Iterable) else (hooks,)
    for hook in given:
        if not isinstance(hook, Hook):
            raise ConfigError(
                f"fit(hooks=...): expected a tfpar.Hook, got {hook!r}. Write tfpar.Hook(every, function)."
            )
    return given


def boundaries(step: int, hooks: Sequence[Hook]) -> list[int]:
    """Where the loop must stop next for each hook."""
    return [next_multiple(step, hook.every) for hook in hooks]


@dataclasses.dataclass(eq=False)
class _Row:
    """A hook, the steps since it ran last, and whether it has run at this stop."""

    hook: Hook
    since: list[Interval] = dataclasses.field(default_factory=list)
    has_run: bool = False


class HookRows:
    """The rows of one run, in the order in which they run.

    The user's hooks and callbacks may end the run. If one does so before the run's last step, the rows that are due
    only at a last stop (evaluation, hooks with `also=lambda state: state.ending`) also run: before the watching rows,
    or, if the end of an epoch did so, before saving. No row runs twice at a stop.

    Args:
      before: Built-in rows that run first: evaluation.
      user: The user's hooks.
      after: Built-in rows that run last: saving, retuning.
      ends_of_batches: The user's callbacks at the end of a step, before everything else.
      watching: Built-in rows that run after the user's hooks, with the steps since their last run, and change nothing.
      ends_of_epochs: The user's callbacks at the end of an epoch, after all but `after`.
      metric_results: Metrics by name from their summed states.
      gather: `(value, activity) -> values of all workers`, for values that JSON can represent; `activity` as for
        `WorkerAgreement`. All workers call it together, and only if there are user rows.
      scheduled: Whether the run has a schedule, whose rate a hook can multiply. An optimizer object may have its own.
    """

    def __init__(
        self,
        before: Sequence[Hook],
        user: Sequence[Hook],
        after: Sequence[Hook],
        *,
        ends_of_batches: Sequence[Hook] = (),
        watching: Sequence[Hook] = (),
        ends_of_epochs: Sequence[Hook] = (),
        metric_results: MetricResults,
        gather: Callable[[Any, str], list[Any]],
        scheduled: bool = True,
    ) -> None:
        groups = (ends_of_batches, before, user, watching, ends_of_epochs, after)
        self._groups = [[_Row(hook) for hook in group] for group in groups]
        self._metric_results = metric_results
        self._gather = gather
        self._scheduled = scheduled

    @property
    def _rows(self) -> list[_Row]:
        return [row for group in self._groups for row in group]

    def boundaries(self, step: int) -> list[int]:
        """Where the loop must stop next for each row."""
        return boundaries(step, [row.hook for row in self._rows])

    def record(self, steps: Interval) -> None:
        """Keeps the reports of steps for the watching and the user's rows."""
        ends_of_batches, _, user, watching, ends_of_epochs, _ = self._groups
        for row in (*ends_of_batches, *user, *watching, *ends_of_epochs):
            row.since.append(steps)

    def run(self, state: LoopState) -> LoopState:
        """Runs the rows that are due at this stop."""
        ends_of_batches, _, user, watching, ends_of_epochs, after = self._groups
        for row in self._rows:
            row.has_run = False
        state = self._run_user_rows(ends_of_batches, state)
        hooked = self._run_hooks(state)
        if hooked.ending and not state.ending:
            hooked = self._run_hooks(hooked)
        for row in watching:
            self._run_row(row, hooked)
        ended = self._run_user_rows(ends_of_epochs, hooked)
        if ended.ending and not hooked.ending:
            ended = self._run_hooks(ended)
        ended = self._run_rows(after, ended)
        if ended.ending:
            for row in user:
                row.hook.at_end(ended)
        return ended

    def _run_hooks(self, state: LoopState) -> LoopState:
        """Runs evaluation and the user's hooks, as far as they are due and have not run at this stop."""
        _, before, user, *_ = self._groups
        return self._run_user_rows(user, self._run_rows(before, state))

    def _run_row(self, row: _Row, state: LoopState) -> LoopState | None:
        """Runs a row if it is due and has not run yet, with the steps since its last run."""
        if row.has_run or not row.hook.is_due(state):
            return None
        row.has_run = True
        joined = Interval.join(row.since, self._metric_results)
        row.since.clear()
        return row.hook.run(state.replace(since=joined))

    def _run_rows(self, rows: Sequence[_Row], state: LoopState) -> LoopState:
        for row in rows:
            state = self._run_row(row, state) or state
        return state

    def _run_user_rows(self, rows: Sequence[_Row], state: LoopState) -> LoopState:
        if not rows:
            return state
        for row in rows:
            result = self._run_row(row, state)
            if result is None:
                continue
            if not isinstance(result, LoopState):
                raise ConfigError(
                    f"the hook {_name(row.hook)} returned {result!r}. Return state.replace(stop=True) to end the run, "
                    "state.replace(lr_multiplier=0.1) to change the learning rate, or nothing."
                )
            stop = bool(result.stop)  # comparing numbers of NumPy gives an np.bool_
            by = result.stopped_by or f"the hook {_name(row.hook)}" if stop else ""
            multiplier = _multiplier(row.hook, result)
            if multiplier != state.lr_multiplier and not self._scheduled:
                raise ConfigError(
                    f"the hook {_name(row.hook)} returned lr_multiplier={multiplier:g}, but the optimizer object keeps "
                    "its own learning rate. Assign trainer.optimizer.learning_rate, or give Trainer a schedule=..., "
                    "such as schedule='constant', which scales that rate."
                )
            state = state.replace(stop=stop, stopped_by=by, lr_multiplier=multiplier)
        gathered = self._gather([state.stop, state.lr_multiplier], f"the hooks after step {state.step}")
        stops, multipliers = zip(*gathered, strict=True)
        if len({*multipliers}) > 1:
            values = ", ".join(f"{value:g} on worker {rank}" for rank, value in enumerate(multipliers))
            raise ConfigError(
                f"hooks or callbacks changed the learning rate on some workers only: lr_multiplier is {values}. Return "
                "the same value on all workers; state.since and state.results are the same on all."
            )
        stop = any(stops)
        by = "a hook or callback of another worker" if stop and not state.stop else state.stopped_by
        return state.replace(stop=stop, stopped_by=by, ending=state.ending or stop)


def _multiplier(hook: Hook, result: LoopState) -> float:
    """The factor on the learning rate that a hook returned; refuses one with which no step makes sense."""
    value = result.lr_multiplier
    try:
        multiplier = float(value)
    except (TypeError, ValueError):
        multiplier = math.nan
    if math.isfinite(multiplier) and multiplier >= 0:
        return multiplier
    raise ConfigError(
        f"the hook {_name(hook)} returned lr_multiplier={value!r} after step {result.step}. Return a finite factor on "
        "the scheduled learning rate, 0 or more."
    )


def _name(hook: Hook) -> str:
    return str(getattr(hook.run, "__name__", type(hook.run).__name__))

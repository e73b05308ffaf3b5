"""What happens between steps: rows of one list, each with its interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tfpar.config import ConfigError
from tfpar.training.loops.pacing import next_multiple
from tfpar.training.loops.state import Interval, LoopState, MetricResults

import numpy as np


def _never(_: LoopState) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class Hook:
    """Something that a training loop does between two steps.

    The loop stops at every multiple of `every`, on every worker alike, and calls `run` on every worker. The model's
    weights are current then, and no step is under way. Hooks run in the order of their list: after an evaluation that
    is due at the same step, before a checkpoint that is, so that a checkpoint holds what they have changed.

    ```python
    def report(state: tfpar.LoopState) -> None:
        print(state.step, state.since.results()["loss"], state.results.get("accuracy"))

    def stop_early(state: tfpar.LoopState) -> tfpar.LoopState | None:
        return state.replace(stop=True) if state.results.get("loss", 1.0) < 0.1 else None

    trainer.fit(train, epochs=10, validation=test, hooks=[tfpar.Hook(100, report), tfpar.Hook(500, stop_early)])
    ```

    Attributes:
      every: In steps, at least 1.
      run: Takes the state; returns the state to continue with, or None for the same one. Of what it returns, `stop`,
        `stopped_by` and `lr_multiplier` count.
      also: Whether to run at a stop that is no multiple of `every`, such as the last one: `lambda state: state.ending`.
        It must give the same answer on every worker.

    Raises:
      ConfigError: `every` is no positive integer, or `run` cannot be called.
    """

    every: int
    run: Callable[[LoopState], LoopState | None]
    also: Callable[[LoopState], bool] = _never

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int | np.integer) or self.every < 1:
            raise ConfigError(f"Hook(every={self.every!r}): give the number of steps between its runs, at least 1.")
        if not callable(self.run):
            raise ConfigError(f"Hook(run={self.run!r}): give a function that takes a tfpar.LoopState.")

    def is_due(self, state: LoopState) -> bool:
        """Whether it runs at this stop."""
        return state.step % self.every == 0 or self.also(state)


def check_hooks(hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    """The hooks that `fit` was given.

    Raises:
      ConfigError: One of them is no hook.
    """
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise ConfigError(
                f"fit(hooks=...): expected a tfpar.Hook, got {hook!r}. Write tfpar.Hook(every, function)."
            )
    return tuple(hooks)


def boundaries(step: int, hooks: Sequence[Hook]) -> list[int]:
    """Where the loop must stop next for each hook."""
    return [next_multiple(step, hook.every) for hook in hooks]


class HookRows:
    """The rows of one run, in the order in which they run.

    Args:
      before: Built-in rows that run first: evaluation.
      user: The user's rows.
      after: Built-in rows that run last: saving, retuning.
      watching: Built-in rows that run before the user's, with the steps since their last run, and change nothing.
      metric_results: Metrics by name from their summed states.
      any_worker: Whether any worker's value is true. All workers call it together, and only where there are user rows.
    """

    def __init__(
        self,
        before: Sequence[Hook],
        user: Sequence[Hook],
        after: Sequence[Hook],
        *,
        watching: Sequence[Hook] = (),
        metric_results: MetricResults,
        any_worker: Callable[[bool], bool],
    ) -> None:
        self._before, self._watching, self._user, self._after = before, watching, user, after
        self._metric_results = metric_results
        self._any_worker = any_worker
        self._since: list[list[Interval]] = [[] for _ in [*watching, *user]]

    def boundaries(self, step: int) -> list[int]:
        """Where the loop must stop next for each row."""
        return boundaries(step, [*self._before, *self._watching, *self._user, *self._after])

    def record(self, steps: Interval) -> None:
        """Keeps what steps reported for the watching and the user's rows."""
        for since in self._since:
            since.append(steps)

    def run(self, state: LoopState) -> LoopState:
        """Runs the rows that are due at this stop."""
        state = _run_due(self._before, state)
        for hook, since in zip(self._watching, self._since, strict=False):
            self._run_with(hook, since, state)
        if self._user:
            state = self._run_user_rows(state)
        return _run_due(self._after, state)

    def _run_with(self, hook: Hook, since: list[Interval], state: LoopState) -> LoopState | None:
        """Runs a row if it is due, with the steps since its last run."""
        if not hook.is_due(state):
            return None
        joined = Interval.join(since, self._metric_results)
        since.clear()
        return hook.run(state.replace(since=joined))

    def _run_user_rows(self, state: LoopState) -> LoopState:
        for hook, since in zip(self._user, self._since[len(self._watching) :], strict=True):
            result = self._run_with(hook, since, state)
            if result is None:
                continue
            if not isinstance(result, LoopState):
                raise TypeError(f"the hook {hook.run!r} returned {result!r}; expected a tfpar.LoopState or None")
            by = result.stopped_by or f"the hook {_name(hook)}" if result.stop else ""
            state = state.replace(stop=result.stop, stopped_by=by, lr_multiplier=float(result.lr_multiplier))
        stop = self._any_worker(state.stop)
        by = "a hook or callback of another worker" if stop and not state.stop else state.stopped_by
        return state.replace(stop=stop, stopped_by=by, ending=state.ending or stop)


def _name(hook: Hook) -> str:
    return str(getattr(hook.run, "__name__", type(hook.run).__name__))


def _run_due(hooks: Sequence[Hook], state: LoopState) -> LoopState:
    for hook in hooks:
        if hook.is_due(state):
            state = hook.run(state) or state
    return state

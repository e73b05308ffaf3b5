"""`LoopState`: the progress of a run, which loops and hooks pass to each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.config import unknown_name
from tfpar.precision import LossScale

import numpy as np

MetricResults = Callable[[Sequence[np.ndarray]], Mapping[str, Any]]


def _no_metrics(_: Sequence[np.ndarray]) -> Mapping[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True, eq=False)
class Interval:
    """Some consecutive steps.

    Attributes:
      losses: Float64 `[n]`: mean loss over the examples of each step; NaN if a step had none, such as a federated
        round in which no client replied.
      counts: Float64 `[n]`: examples of each step.
      applied: Bool `[n]`: whether the step changed the weights.
      metric_sums: States of the metrics, summed over the steps.
      metric_results: Metrics by name from such sums.
    """

    losses: np.ndarray
    counts: np.ndarray
    applied: np.ndarray
    metric_sums: Sequence[np.ndarray] = ()
    metric_results: MetricResults = _no_metrics

    @classmethod
    def join(cls, intervals: Sequence[Interval], metric_results: MetricResults) -> Interval:
        """One interval of several, in order; an empty one of none."""
        if not intervals:
            return cls(np.zeros(0), np.zeros(0), np.zeros(0, bool), (), metric_results)
        return cls(
            np.concatenate([part.losses for part in intervals]),
            np.concatenate([part.counts for part in intervals]),
            np.concatenate([part.applied for part in intervals]),
            [np.sum(parts, axis=0) for parts in zip(*(part.metric_sums for part in intervals), strict=True)],
            metric_results,
        )

    @property
    def counted(self) -> np.ndarray:
        """Bool `[n]`: whether the loss of a step counts: the step was applied, and had examples."""
        return self.applied & ~np.isnan(self.losses)

    @property
    def skipped(self) -> np.ndarray:
        """Bool `[n]`: whether a step was left out because a replica was not finite, not for want of examples."""
        return ~self.applied & (self.counts != 0)

    def results(self) -> dict[str, Any]:
        """`loss`, the mean over all examples of the applied steps (NaN if there are none), and metrics by name."""
        counts = self.counts[self.counted]
        if not counts.sum():
            return {"loss": math.nan}
        loss = float(np.average(self.losses[self.counted], weights=counts))
        return {"loss": loss, **(self.metric_results(self.metric_sums) if self.metric_sums else {})}


class RunningResults:
    """The results of consecutive steps so far, at a cost that does not grow with their number.

    Losses are added up in the order of the steps, so that results do not depend on how many steps come at once.

    Args:
      metric_results: Metrics by name from the sums of their states.
    """

    def __init__(self, metric_results: MetricResults) -> None:
        self._metric_results = metric_results
        self._loss_sum = self._count = 0.0
        self._metric_sums: list[np.ndarray] = []

    def add(self, steps: Interval) -> None:
        """Adds the steps that come next, if there are any."""
        if not len(steps.losses):
            return
        losses, counts = steps.losses[steps.counted], steps.counts[steps.counted]
        self._loss_sum = _added(self._loss_sum, losses * counts)
        self._count = _added(self._count, counts)
        before = self._metric_sums or [np.zeros_like(each) for each in steps.metric_sums]
        self._metric_sums = [old + new for old, new in zip(before, steps.metric_sums, strict=True)]

    def results(self) -> dict[str, Any]:
        """As of one interval of all these steps, see `Interval.results`."""
        if not self._count:
            return {"loss": math.nan}
        metrics = self._metric_results(self._metric_sums) if self._metric_sums else {}
        return {"loss": self._loss_sum / self._count, **metrics}


def _added(total: float, values: np.ndarray) -> float:
    """The total and values, added one after the other; `np.sum` would add them in pairs."""
    return float(np.cumsum([total, *values])[-1])


_NO_STEPS = Interval(np.zeros(0), np.zeros(0), np.zeros(0, bool))


@dataclasses.dataclass(frozen=True, eq=False)
class LoopState:
    """The state of a run after `step` steps. The same on every worker.

    A hook reads it, and may return a copy with another `stop` or `lr_multiplier`.

    Attributes:
      step: Steps done, over all starts of the run.
      total: Steps of the whole run.
      results: The last evaluation: `loss`, `examples`, and metrics by name; empty before the first.
      evaluated_at: The step that `results` belong to; -1 before the first.
      best: The lowest finite validation loss so far, or None.
      best_step: The step of that evaluation, if this start made it; else -1.
      skipped: Steps left out because a replica was not finite.
      since: The steps since this hook ran last, or since this start began. Empty outside of hooks.
      lr_multiplier: A factor on the scheduled learning rate, in addition to the schedule's own factors.
      stop: End the run here, as finished. It is enough that one worker's hook sets it.
      stopped_by: The cause that set `stop`, as text; a hook may give it with `state.replace(stop=True,
        stopped_by=...)`.
      preempted: A worker was asked to end (SIGTERM).
      ending: This is the last stop of this start: the run is finished, preempted, or after `--stop_after` steps.
      loss_scale: The loss scale (mixed_float16), or None under `parameter_server`.
      loss_sum: Sum of the losses of all examples of the applied steps of this epoch, or of the epoch that has just
        ended.
      loss_count: The number of these examples, or the sum of their weights.
      evaluating: The step whose evaluation is still running, under `parameter_server`; otherwise -1.
    """

    step: int
    total: int
    results: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluated_at: int = -1
    best: float | None = None
    best_step: int = -1
    skipped: int = 0
    since: Interval = _NO_STEPS
    lr_multiplier: float = 1.0
    stop: bool = False
    stopped_by: str = ""
    preempted: bool = False
    ending: bool = False
    loss_scale: LossScale | None = None
    loss_sum: float = 0.0
    loss_count: float = 0.0
    evaluating: int = -1

    @property
    def train_loss(self) -> float | None:
        """Mean loss over the examples of the last epoch so far: Keras' `loss` of that epoch."""
        return self.loss_sum / self.loss_count if self.loss_count else None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        return self.stop or self.step >= self.total

    def replace(self, **changes: Any) -> LoopState:
        """A copy with other values of some attributes.

        Raises:
          ConfigError: There is no such attribute.
        """
        for name in changes.keys() - _FIELDS:
            raise unknown_name("LoopState.replace: attribute", name, _FIELDS)
        return dataclasses.replace(self, **changes)

    def advanced(self, steps: Interval, *, steps_per_epoch: int, first_step: int = 0) -> LoopState:
        """The state after some more steps.

        Args:
          steps: Their reports.
          steps_per_epoch: Steps of one pass over the examples; the training loss starts again there.
          first_step: Steps before the first of these passes.
        """
        done = self.step - first_step
        after = done + len(steps.losses)
        first = max(0, (after - 1) // steps_per_epoch * steps_per_epoch - done)  # the first one in the last epoch
        starts_again = first > 0 or done % steps_per_epoch == 0
        counted = steps.counted[first:]
        counts = steps.counts[first:][counted].astype(np.float64)
        losses = steps.losses[first:][counted].astype(np.float64) * counts
        loss_sum, loss_count = (0.0, 0.0) if starts_again else (self.loss_sum, self.loss_count)
        # One by one, so that the sums do not depend on how many steps a call has, or where a run was resumed.
        return self.replace(
            step=self.step + len(steps.losses),
            skipped=self.skipped + int(np.sum(steps.skipped)),
            loss_sum=_added(loss_sum, losses),
            loss_count=_added(loss_count, counts),
        )

    def evaluated(self, step: int, results: Mapping[str, Any]) -> LoopState:
        """The state with the results of an evaluation of step `step`, the best one so far or not."""
        loss = results.get("loss", math.nan)
        state = self.replace(results=results, evaluated_at=step, evaluating=-1)
        if not math.isfinite(loss) or (self.best is not None and loss >= self.best):
            return state
        return state.replace(best=loss, best_step=step)


_FIELDS = frozenset(field.name for field in dataclasses.fields(LoopState))

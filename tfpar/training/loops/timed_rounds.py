"""Rounds of a given duration, in which each worker takes as many steps as it can: `--round_seconds`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.training.loops.state import Interval
from tfpar.training.step_loop import StepsResult

import numpy as np

# A round consists of calls; each takes about one eighth of it, and the time left is checked between calls.
_PART = 8
# Factor on the expected time until a stop. Steps do not take the same time in every round: without it, a worker that is
# a little slower would often miss its last step, and a further round would have to make up for it.
_LENIENCE = 1.25

Call = tuple[StepsResult, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class OwnSteps:
    """The report of this worker's steps, from one or several calls.

    Attributes:
      done: The steps.
      loss_counts: Float32 `[n]`: see `StepsResult`.
      durations: Float64 `[n, 6]`, seconds, see `timings.COLUMNS`.
      last: The report of the last call.
    """

    done: Interval
    loss_counts: np.ndarray
    durations: np.ndarray
    last: StepsResult

    @classmethod
    def of(cls, calls: Sequence[Call]) -> OwnSteps:
        """The steps of some calls, one after the other."""
        results = [result for result, _ in calls]
        losses, counts, finite, loss_counts = (
            np.concatenate([getattr(result, name).numpy() for result in results])
            for name in ("loss", "count", "finite", "loss_counts")
        )
        metrics = [
            sum(part.numpy() for part in parts) for parts in zip(*(each.metrics for each in results), strict=True)
        ]
        durations = np.concatenate([durations for _, durations in calls])
        return cls(Interval(losses, counts, finite, metrics), loss_counts, durations, results[-1])


def limits(steps: int, rates: np.ndarray) -> tuple[np.ndarray, float]:
    """Divides the steps until a stop among the workers, so that all arrive at it at about the same time.

    Args:
      steps: Steps of the run until the stop, each of which stands for one step of every worker.
      rates: Float64 `[workers]`: steps per second of each worker.

    Returns:
      The most steps of each worker, int64 `[workers]`, at least one each and together `steps` of every worker; and the
      seconds after which none of them should begin another.
    """
    total, shares = steps * len(rates), steps * len(rates) * rates / rates.sum()
    most = np.maximum(np.floor(shares), 1.0).astype(np.int64)
    while most.sum() < total:
        most[np.argmin((most + 1) / rates)] += 1
    while most.sum() > total:
        most[np.argmax(np.where(most > 1, most / rates, 0.0))] -= 1
    return most, _LENIENCE * float((most / rates).max())


def run_for(
    seconds: float, most: int, call: Callable[[int, int], Call], asked_to_end: Callable[[], bool] = lambda: False
) -> list[Call]:
    """Takes as many steps as fit in a time; at least one.

    Args:
      seconds: The time.
      most: At most this many steps.
      call: `(done, steps)`: takes some steps after those done.
      asked_to_end: Whether to take no more steps; asked after each call.
    """
    calls: list[Call] = []
    began, done, per_step = time.perf_counter(), 0, 0.0
    while done < most:
        left = seconds - (time.perf_counter() - began)
        if calls and (left < per_step or asked_to_end()):
            break
        steps = min(max(int(min(left, seconds / _PART) / per_step), 1), most - done) if calls else 1
        started = time.perf_counter()
        calls.append(call(done, steps))
        per_step = (time.perf_counter() - started) / steps
        done += steps
    return calls


def joined_steps(
    own: OwnSteps, row: np.ndarray, steps_of: Callable[[np.ndarray], int], agreement: WorkerAgreement
) -> tuple[Interval, np.ndarray, np.ndarray]:
    """The steps of all workers as one interval, the same on each worker, however many steps each has taken.

    Every step of the interval reports the means over the round. As many of them count as skipped as all workers
    together have skipped, but at most all.

    Args:
      own: The report of this worker's steps.
      row: Float64 `[k]`: other numbers of this worker.
      steps_of: Converts the numbers of steps that each worker has taken to a number of steps of the run.
      agreement: The agreement between the workers.

    Returns:
      The interval; the rows of all workers, `[workers, k]`; and for each worker the sum of the loss counts of the steps
      that it has applied, `[workers]`.
    """
    done, applied = own.done, own.done.applied
    weight = float(np.sum(own.loss_counts[applied], dtype=np.float64))
    loss = float(np.sum(own.loss_counts[applied] * done.losses[applied], dtype=np.float64))
    sums = [len(done.losses), loss, weight, *(float(done.counts[part].sum()) for part in (applied, done.skipped))]
    sums.append(float(np.sum(done.skipped)))
    sizes = [part.size for part in done.metric_sums]
    parts = [row, sums, *(np.ravel(part) for part in done.metric_sums)]
    table = np.stack(agreement.gather_arrays(np.concatenate([np.asarray(part, np.float64) for part in parts])))
    rows, totals, *metrics = np.split(table, np.cumsum([len(row), len(sums), *sizes])[:-1], axis=1)
    taken, losses, weights, counts, bad_counts, bad = totals.T
    steps = steps_of(np.rint(taken).astype(np.int64))
    skipped = min(round(float(bad.sum())), steps) if weights.sum() else steps
    good = np.arange(steps) >= skipped
    mean = losses.sum() / weights.sum() if weights.sum() else np.nan
    count, bad_count = counts.sum() / max(steps - skipped, 1), bad_counts.sum() / max(skipped, 1)
    metric_sums = [part.sum(axis=0).reshape(one.shape) for part, one in zip(metrics, done.metric_sums, strict=True)]
    interval = Interval(np.where(good, mean, np.nan), np.where(good, count, bad_count), good, metric_sums)
    return interval, rows, weights

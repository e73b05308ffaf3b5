"""Where the time of a step goes: the arithmetic behind the progress line, TensorBoard and summary.json."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# Columns of durations, in seconds; `total` is the wall-clock time of the step, the sum of the four before it.
# `exchange` is the time in which nothing else was done. Time in which some gradients already travelled and others were
# still being computed counts as `compute`, and once more as `overlapped`.
COLUMNS = ("input_wait", "compute", "exchange", "update", "total", "overlapped")
_WAIT, _TOTAL = COLUMNS.index("input_wait"), COLUMNS.index("total")


def durations(began: tf.Tensor, stamps: tf.Tensor) -> tf.Tensor:
    """Seconds `[n, 6]` from the times `[n, 5]` at which batch, first gradient, all, exchange and update were done."""
    fetched, first, computed, exchanged, done = tf.unstack(stamps, axis=1)
    before = tf.concat([[began], done[:-1]], axis=0)
    # A batch may have arrived before the previous step ended. And clocks are read concurrently, so one may be read
    # after another that follows it in the step.
    start = tf.maximum(fetched, before)
    computed = tf.maximum(computed, start)
    first = tf.clip_by_value(first, start, computed)
    exchanged = tf.maximum(exchanged, computed)
    done = tf.maximum(done, exchanged)
    parts = [start - before, computed - start, exchanged - computed, done - exchanged, done - before, computed - first]
    return tf.stack(parts, axis=1)


class Window:
    """Sums over the steps since the last report."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Starts a new window."""
        self.steps = 0
        self.examples = 0.0
        self._seconds = np.zeros(len(COLUMNS))
        self._loss_sum = 0.0
        self._loss_weight = 0.0
        self.worker_seconds: list[float] = []
        self.worker_steps = 0

    def add_workers(self, seconds: Sequence[float], steps: int) -> None:
        """Adds the time that each worker needed for some steps, in the order of their ranks; nothing if it is not
        known."""
        if len(seconds):
            known = self.worker_seconds or [0.0] * len(seconds)
            self.worker_seconds = [total + part for total, part in zip(known, seconds, strict=True)]
            self.worker_steps += steps

    def add(self, losses: np.ndarray, durations: np.ndarray, examples: np.ndarray) -> None:
        """Adds steps.

        Args:
          losses: [n] mean loss over the examples of each step; not-finite ones do not count.
          durations: [n, 6] seconds, see `COLUMNS`.
          examples: [n] examples of each step.
        """
        finite = np.isfinite(losses)
        self.steps += len(losses)
        self.examples += float(examples.sum())
        self._seconds += durations.sum(axis=0)
        self._loss_sum += float((losses[finite] * examples[finite]).sum())
        self._loss_weight += float(examples[finite].sum())

    def merge(self, other: Window) -> None:
        """Adds the steps of another window."""
        self.steps += other.steps
        self.examples += other.examples
        self._seconds = self._seconds + other._seconds
        self._loss_sum += other._loss_sum
        self._loss_weight += other._loss_weight

    def forget_times(self) -> None:
        """Keeps the losses, but takes these steps out of every speed."""
        self.examples = 0.0
        self._seconds = np.zeros(len(COLUMNS))

    @property
    def seconds(self) -> float:
        """The steps' own time."""
        return float(self._seconds[_TOTAL])

    @property
    def span(self) -> str:
        """What `loss` is about: `1 step`, `mean of 100 steps`."""
        return f"mean of {self.steps} steps" if self.steps > 1 else "1 step"

    @property
    def loss(self) -> float:
        """Mean over the examples of the steps whose loss is finite; NaN if there is none."""
        return self._loss_sum / self._loss_weight if self._loss_weight else float("nan")

    @property
    def examples_per_second(self) -> float:
        """Examples per second of the steps' own time, without evaluations and checkpoints."""
        return _ratio(self.examples, self._seconds[_TOTAL])

    @property
    def input_wait_fraction(self) -> float:
        """Share of the time spent waiting for input."""
        return _ratio(self._seconds[_WAIT], self._seconds[_TOTAL])

    def milliseconds(self) -> dict[str, float]:
        """Mean milliseconds per step, by `COLUMNS`."""
        return {name: 1e3 * _ratio(total, self.steps) for name, total in zip(COLUMNS, self._seconds, strict=True)}


class RecentSteps:
    """The last calls: at least `STEPS` steps, or those of the last `SECONDS`, where there have been as many.

    A line on the terminal shows the mean over them. The times of the first call, which were mostly compilation, are
    dropped after the next call; its losses and metrics are kept.
    """

    STEPS = 100
    SECONDS = 60.0

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[Window, Sequence[np.ndarray]]] = collections.deque()
        self._added = 0

    def add(
        self, losses: np.ndarray, durations: np.ndarray, examples: np.ndarray, metric_sums: Sequence[np.ndarray]
    ) -> None:
        """Adds the steps of one call, and forgets the calls that are not needed any more.

        Args:
          losses: As for `Window.add`.
          durations: As for `Window.add`.
          examples: As for `Window.add`.
          metric_sums: States of the metrics, summed over these steps.
        """
        self._added += 1
        if self._added == 2:
            self._calls[0][0].forget_times()
        call = Window()
        call.add(losses, durations, examples)
        self._calls.append((call, metric_sums))
        steps, seconds = sum(window.steps for window, _ in self._calls), sum(each.seconds for each, _ in self._calls)
        while len(self._calls) > 1:
            first = self._calls[0][0]
            if steps - first.steps < self.STEPS and seconds - first.seconds < self.SECONDS:
                return
            steps, seconds = steps - first.steps, seconds - first.seconds
            self._calls.popleft()

    def window(self) -> tuple[Window, list[np.ndarray]]:
        """Loss and times over these steps, and the sums of the metrics."""
        whole, sums = Window(), MetricSums()
        for window, parts in self._calls:
            whole.merge(window)
            sums.add(parts)
        return whole, sums.take()


class MetricSums:
    """States of metrics, which are sums, added up since they were last taken."""

    def __init__(self) -> None:
        self._sums: list[np.ndarray] = []

    def add(self, parts: Sequence[np.ndarray]) -> None:
        """Adds the sums of some steps."""
        known = self._sums or [np.zeros_like(part, np.float64) for part in parts]
        self._sums = [total + part for total, part in zip(known, parts, strict=True)]

    def take(self) -> list[np.ndarray]:
        """Returns the sums and resets them."""
        sums, self._sums = self._sums, []
        return sums


class Timings:
    """Statistics of a whole run, without its first call, which traces and compiles."""

    def __init__(self) -> None:
        self._compiled = False
        self._totals: list[np.ndarray] = []
        self._wait = 0.0
        self._examples = 0.0

    def add(self, durations: np.ndarray, examples: np.ndarray) -> None:
        """Adds the steps of one call: durations [n, 6] in seconds, examples [n]."""
        if not self._compiled:
            self._compiled = True
            return
        self._totals.append(durations[:, _TOTAL].astype(np.float32))
        self._wait += float(durations[:, _WAIT].sum())
        self._examples += float(examples.sum())

    def statistics(self) -> dict[str, float | None]:
        """Steady-state figures.

        Returns:
          `examples_per_second`; `step_ms_p50` and `step_ms_p95`, milliseconds per step; `input_wait_fraction`. All are
          None if there was no call after the first.
        """
        if not self._totals:
            return dict.fromkeys(("examples_per_second", "step_ms_p50", "step_ms_p95", "input_wait_fraction"))
        totals = np.concatenate(self._totals)
        seconds = float(totals.sum(dtype=np.float64))
        p50, p95 = np.percentile(totals, [50, 95])
        return {
            "examples_per_second": _ratio(self._examples, seconds),
            "step_ms_p50": 1e3 * float(p50),
            "step_ms_p95": 1e3 * float(p95),
            "input_wait_fraction": _ratio(self._wait, seconds),
        }


class Utilisation:
    """Model FLOPs utilisation (MFU; Chowdhery et al. 2022, appendix B).

    A peak that was measured while other programs ran is too low. Steps that exceed it raise it to what they reached.

    Args:
      flops_per_example: Floating-point operations that training on one example takes; 0 if unknown.
      peak_flops: Operations per second that all replicas together could do at best; 0 if unknown.
    """

    def __init__(self, flops_per_example: float, peak_flops: float) -> None:
        self._flops_per_example, self._peak = flops_per_example, peak_flops

    def at(self, examples_per_second: float) -> float | None:
        """The fraction of the peak that this speed uses, at most 1; None if it is unknown."""
        if not self._flops_per_example or not self._peak:
            return None
        reached = examples_per_second * self._flops_per_example
        self._peak = max(self._peak, reached)
        return reached / self._peak


def own_seconds(durations: np.ndarray) -> float:
    """Seconds that a worker needs itself for its steps, without the exchange, in which it waits for others.

    Args:
      durations: [n, 6] seconds, see `COLUMNS`.
    """
    return float(durations[:, _TOTAL].sum() - durations[:, COLUMNS.index("exchange")].sum())


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else 0.0

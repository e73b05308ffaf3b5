"""Chooses the number of steps per call from Python, and the calls that report norms."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

# Long enough to make the call's own cost (some 200 us) negligible, short enough for frequent progress lines.
TARGET_SECONDS = 0.5
_MAXIMUM = 2000


class StepsPerCall:
    """Chooses the length of the next call from the measured step time.

    Args:
      fixed: Steps per call; 0 adapts.
      target_seconds: How long a call should take if the number adapts.
    """

    def __init__(self, fixed: int = 0, target_seconds: float = TARGET_SECONDS) -> None:
        self._fixed = fixed
        self._target_seconds = target_seconds
        self._step_seconds: float | None = None

    def next(self, step: int, boundaries: list[int]) -> int:
        """Steps to run from `step` on, not past the nearest of `boundaries` (each greater than `step`)."""
        if self._fixed:
            wanted = self._fixed
        elif self._step_seconds is None:
            wanted = 1  # the first call compiles, so its time does not show the speed
        else:
            wanted = max(1, min(_MAXIMUM, int(self._target_seconds / self._step_seconds)))
        return min([wanted, *[boundary - step for boundary in boundaries]])

    def measured(self, steps: int, seconds: float) -> None:
        """Records a finished call; the first one, which compiles, is not measured."""
        if self._step_seconds is None:
            self._step_seconds = self._target_seconds  # one step next, to measure without compilation
        else:
            self._step_seconds = max(seconds / steps, 1e-6)


# Seconds between two reports of norms: after a call of several steps, of which they take little, and after a single
# step, of which they may take a tenth.
_SEVERAL, _SINGLE = 2.0, 10.0
_NEVER, _AT_POINTS, _NOW = 0.0, 1.0, 2.0


class NormPacing:
    """Chooses the calls that report norms over all weights, which read the whole model several times.

    These are the last call, those in which a point of the charts is due by its number and, if there are other points,
    the first call and those some time after the last report. All workers must choose the same calls, so the chief's
    clock decides: with the report of a call, it sends its answer for the next one.

    Args:
      records: Whether this worker writes the norms.
      cadence: Steps between two points.
      total: Steps of the run.
      timed: Whether there are points at other steps, after some time.
      now: Returns the time in seconds.
    """

    def __init__(
        self, records: bool, cadence: int, total: int, *, timed: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._records, self._cadence, self._total, self._timed, self._now = records, cadence, total, timed, now
        self._answer, self._reported = _NOW if timed else _AT_POINTS, now()

    def wanted(self, step: int, steps: int) -> bool:
        """Whether the call of so many steps after `step` reports norms."""
        end = step + steps
        at_point = next_multiple(step, self._cadence) <= end or end >= self._total
        return self._answer == _NOW or (self._answer == _AT_POINTS and at_point)

    def own_answer(self, wanted: bool, steps: int, seconds: float) -> float:
        """This worker's answer for the next call.

        Args:
          wanted: Whether the last call reported norms.
          steps: Its steps.
          seconds: Its duration.
        """
        now = self._now()
        self._reported = now if wanted else self._reported
        due = self._timed and now + seconds - self._reported >= (_SEVERAL if steps > 1 else _SINGLE)
        return _NEVER if not self._records else _NOW if due else _AT_POINTS

    def answered(self, answers: Sequence[float]) -> None:
        """Takes the answers of all workers; only the chief's is not `_NEVER`."""
        self._answer = max(answers)


def next_multiple(step: int, every: int) -> int:
    """The first multiple of `every` after `step`."""
    return (step // every + 1) * every

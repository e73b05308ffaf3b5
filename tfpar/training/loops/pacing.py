"""Chooses the number of steps per call from Python."""

from __future__ import annotations

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
            self._step_seconds = self._target_seconds / 5  # five steps next, to measure without compilation
        else:
            self._step_seconds = max(seconds / steps, 1e-6)


def next_multiple(step: int, every: int) -> int:
    """The first multiple of `every` after `step`."""
    return (step // every + 1) * every

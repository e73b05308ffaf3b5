"""Reduce-on-plateau, the one schedule that no function of the step can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class PlateauController:
    """Lowers the learning rate when an evaluation result has stopped improving. Lives on the host.

    Args:
      factor: Factor on the multiplier at each reduction, in (0, 1).
      patience: Evaluations without improvement after which that happens.
      min_delta: By how much a value must beat the best one to count as an improvement.
      cooldown: Evaluations after a reduction during which none is counted as bad.
      minimum: The multiplier does not fall below this.
      mode: `min` where smaller values are better, such as a loss; `max` where larger ones are.

    Raises:
      ValueError: A value out of range.
    """

    def __init__(
        self,
        factor: float = 0.1,
        patience: int = 5,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        minimum: float = 0.0,
        mode: str = "min",
    ) -> None:
        if not 0.0 < factor < 1.0:
            raise ValueError(f"factor={factor} must lie between 0 and 1.")
        if patience < 1 or cooldown < 0 or min_delta < 0.0 or not 0.0 <= minimum <= 1.0:
            raise ValueError(
                f"patience={patience} must be at least 1, cooldown={cooldown} and min_delta={min_delta} not negative, "
                f"and minimum={minimum} between 0 and 1."
            )
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} must be 'min' or 'max'.")
        self._factor = factor
        self._patience = patience
        self._min_delta = min_delta
        self._cooldown = cooldown
        self._minimum = minimum
        self._sign = 1.0 if mode == "min" else -1.0
        self._multiplier = 1.0
        self._best: float | None = None
        self._bad = 0
        self._cooling = 0

    @property
    def multiplier(self) -> float:
        """The factor on the scheduled learning rate."""
        return self._multiplier

    def update(self, value: float) -> float:
        """Processes one evaluation result; NaN is not an improvement.

        Returns:
          The multiplier from here on.
        """
        signed = self._sign * float(value)
        cooling = self._cooling > 0
        self._cooling = max(0, self._cooling - 1)
        if not math.isnan(signed) and (self._best is None or signed < self._best - self._min_delta):
            self._best = signed
            self._bad = 0
        elif not cooling:
            self._bad += 1
            if self._bad >= self._patience:
                self._multiplier = max(self._multiplier * self._factor, self._minimum)
                self._cooling = self._cooldown
                self._bad = 0
        return self._multiplier

    def state(self) -> dict[str, Any]:
        """Everything that `update` changes, for a checkpoint; fit for JSON."""
        return {"multiplier": self._multiplier, "best": self._best, "bad": self._bad, "cooling": self._cooling}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state()`."""
        self._multiplier = float(state["multiplier"])
        self._best = None if state["best"] is None else float(state["best"])
        self._bad = int(state["bad"])
        self._cooling = int(state["cooling"])

"""`--histogram_every`: distributions of the weights, and of their changes in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Weights = Callable[[], Mapping[str, np.ndarray]]


class WeightHistograms:
    """Compares the weights before and after every `every`-th step.

    Args:
      every: Steps between two histograms; 0 for none.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._before: dict[str, np.ndarray] | None = None

    def next_boundary(self, step: int, otherwise: int) -> int:
        """Where the next call must end at the latest: before and after a step that is shown."""
        if not self._every:
            return otherwise
        shown = (step // self._every + 1) * self._every
        return min(otherwise, shown - 1 if step < shown - 1 else shown)

    def before_step(self, step: int, weights: Weights) -> None:
        """Keeps the weights if the next step, after `step` finished ones, is shown."""
        if self._every and (step + 1) % self._every == 0:
            self._before = {name: np.array(value) for name, value in weights().items()}

    def after_step(self, step: int, weights: Weights) -> dict[str, np.ndarray]:
        """The arrays to show after `step` finished steps, by tag; none if that step is not shown."""
        before, self._before = self._before, None
        if before is None or step % self._every:
            return {}
        after = weights()
        values = {f"weights/{name}": value for name, value in after.items()}
        return values | {f"weight_updates/{name}": value - before[name] for name, value in after.items()}

"""Moving averages between two runs: after a run, a model has the averages of the user's optimizer, as in Keras."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tfpar.parallel.split import assign_whole, whole

import keras
import numpy as np


@dataclasses.dataclass(eq=False)
class AveragesBetweenRuns:
    """Sets weights to their moving averages while no run is in progress.

    Keras' `fit` ends in this way if the optimizer has `use_ema` (3.15, `finalize_variable_values`), and the next call
    continues from the averages. With a workdir, all calls of `fit` are one run: the next call continues from the
    weights, as a run that resumes from a checkpoint does.
    """

    _given: list[tuple[keras.Variable, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def left_behind(
        self, weights: Sequence[keras.Variable], averages: Callable[[], Sequence[keras.Variable]], *, one_run: bool
    ) -> Iterator[None]:
        """Assigns the averages at the end, unless the run ends with an error.

        Args:
          weights: The weights.
          averages: Returns the variable with the average of each weight, or the weight itself if it has none.
          one_run: Whether to undo, at the start, the averages that the previous call assigned, except for weights
            assigned since.
        """
        for variable, own, given in self._given:
            if one_run and np.array_equal(whole(variable), given):
                assign_whole(variable, own)
        self._given.clear()
        yield
        for variable, average in zip(weights, averages(), strict=True):
            if average is not variable:
                self._given.append((variable, whole(variable), whole(average)))
                assign_whole(variable, whole(average))

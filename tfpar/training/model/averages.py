"""Moving averages between two runs: a model is left with those of the user's optimizer, as Keras leaves it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tfpar.parallel.split import assign_whole, whole

import keras
import numpy as np


@dataclasses.dataclass(eq=False)
class AveragesBetweenRuns:
    """Gives weights the values of their moving averages while no run goes on.

    Keras' `fit` ends so with an optimizer that has `use_ema` (3.15, `finalize_variable_values`), and the next one goes
    on from the averages. With a workdir, all calls of `fit` are one run: the next goes on from the weights, as a run
    does that resumes from a checkpoint.
    """

    _given: list[tuple[keras.Variable, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def left_behind(
        self, weights: Sequence[keras.Variable], averages: Callable[[], Sequence[keras.Variable]], *, one_run: bool
    ) -> Iterator[None]:
        """Gives the averages at the end, unless the run ends with an error.

        Args:
          weights: The weights.
          averages: Returns the variable with the average of each; the weight itself where there is none.
          one_run: Whether to take averages back at the start that the run before has given, but for weights that were
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

"""Moving averages of the weights: for evaluation and export, and in the user's model between two runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from tfpar.optim import optimizers
from tfpar.parallel.split import assign_whole, whole

import keras
import numpy as np


class MovingAverages:
    """The moving averages of an optimizer, each a variable beside its weight.

    Args:
      model: Its trainable weights are those of the optimizer.
      optimizer: Built for them; it keeps averages, or not.
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    @property
    def exist(self) -> bool:
        """Whether there are averages: the optimizer keeps them from its first step on."""
        return self._optimizer.use_ema and int(self._optimizer.iterations.numpy()) > 0

    def weights(self) -> list[keras.Variable]:
        """The variables for evaluation and export, in the order of the trainable weights: their averages, or themselves
        if they have none."""
        weights = self._model.trainable_variables
        averages = optimizers.ema_variables(self._optimizer) if self.exist else None
        pairs = zip(averages or weights, weights, strict=True)
        return [average if average is not None else weight for average, weight in pairs]

    def values(self) -> Iterator[tuple[keras.Variable, np.ndarray]]:
        """The weights that have an average, each with the whole average. All workers read all of them together."""
        for weight, average in zip(self._model.trainable_variables, self.weights(), strict=True):
            if average is not weight:
                yield weight, whole(average)

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """The context in which `weights` are to be read. All workers open it together."""
        return contextlib.nullcontext()


@dataclasses.dataclass(eq=False)
class AveragesBetweenRuns:
    """Sets weights to their moving averages while no run is in progress.

    Keras' `fit` ends in this way if the optimizer has `use_ema` (3.15, `finalize_variable_values`), and the next call
    continues from the averages. With a workdir, all calls of `fit` are one run: the next call continues from the
    weights, as a run that resumes from a checkpoint does.
    """

    _given: list[tuple[keras.Variable, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def left_behind(self, averages: MovingAverages, *, one_run: bool) -> Iterator[None]:
        """Assigns the averages at the end, unless the run ends with an error.

        Args:
          averages: The averages.
          one_run: Whether to undo, at the start, the averages that the previous call assigned, except for weights
            assigned since.
        """
        for variable, own, given in self._given:
            if one_run and np.array_equal(whole(variable), given):
                assign_whole(variable, own)
        self._given.clear()
        yield
        for variable, average in averages.values():
            self._given.append((variable, whole(variable), average))
            assign_whole(variable, average)

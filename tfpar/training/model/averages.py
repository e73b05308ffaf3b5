"""Moving averages of the weights: for evaluation and export, and in the user's model between two runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from tfpar.optim import optimizers
from tfpar.parallel.split import assign_whole, copies_of, whole
from tfpar.training.model.building import is_same

import keras
import numpy as np
import tensorflow as tf


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

    @property
    def averaged(self) -> list[keras.Variable]:
        """The weights that may have an average."""
        return list(self._model.trainable_variables) if self.exist else []

    def restart(self, weights: Sequence[keras.Variable]) -> None:
        """Sets the averages of some weights to this worker's copies of the weights, or its parts of them."""
        restarted = {*map(id, weights)}
        for weight, average in zip(self._model.trainable_variables, self.weights(), strict=True):
            if id(weight) in restarted and average is not weight:
                for copy, value in zip(copies_of(average), copies_of(weight), strict=True):
                    copy.assign(value.read_value())

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """The context in which `weights` are to be read. All workers open it together."""
        return contextlib.nullcontext()


@dataclasses.dataclass(eq=False)
class AveragesBetweenRuns:
    """Sets weights to their moving averages between runs, and averages to the weights that are assigned there.

    Keras' `fit` ends in this way if the optimizer has `use_ema` (3.15, `finalize_variable_values`), and the next call
    continues from the averages. With a workdir, all calls of `fit` are one run: the next call continues from the
    weights, as a run that resumes from a checkpoint does.
    """

    _given: list[tuple[keras.Variable, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    _left: list[tuple[keras.Variable, list[tf.Tensor]]] = dataclasses.field(default_factory=list)

    def take_over(self, averages: MovingAverages) -> None:
        """Restarts the averages of weights that were assigned since the last run."""
        averages.restart([each for each, left in self._left if not all(map(is_same, left, _values_of(each)))])

    @contextlib.contextmanager
    def left_behind(self, averages: MovingAverages, *, assigns: bool, one_run: bool) -> Iterator[None]:
        """Assigns the averages at the end, unless the run ends with an error.

        Args:
          averages: The averages.
          assigns: Whether to assign them, or only to note the weights.
          one_run: Whether to undo, at the start, the averages that the previous call assigned, except for weights
            assigned since.
        """
        for variable, own, given in self._given:
            if one_run and np.array_equal(whole(variable), given):
                assign_whole(variable, own)
        self._given.clear()
        self._left.clear()
        yield
        for variable, average in averages.values() if assigns else ():
            self._given.append((variable, whole(variable), average))
            assign_whole(variable, average)
        # A tensor that was read shares the memory of its variable until another value is assigned.
        self._left += [(variable, _values_of(variable)) for variable in averages.averaged]


def _values_of(variable: keras.Variable) -> list[tf.Tensor]:
    """This worker's copies of a weight, or its parts of it."""
    return [copy.read_value() for copy in copies_of(variable)]

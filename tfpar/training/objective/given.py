"""A user-defined objective in place of losses and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfpar.config import ConfigError
from tfpar.training.objective.protocol import Objective
from tfpar.training.objective.supervised import Goal

import keras


@dataclasses.dataclass(frozen=True)
class OwnGoal:
    """The counterpart of `Goal` for a user-defined objective.

    Attributes:
      make: `(model) -> Objective`, called once with the built model, under the strategy.
      loss: None, because there is no loss of the model's outputs.
    """

    make: Callable[[keras.Model], Objective]
    loss: None = None

    @classmethod
    def instead_of(cls, goal: Goal, make: Callable[[keras.Model], Objective]) -> OwnGoal:
        """The goal for an objective that `make` returns.

        Raises:
          ConfigError: Losses or metrics are given too, or `make` cannot be called.
        """
        others = {"loss": goal.loss, "metrics": goal.metrics, "weighted_metrics": goal.weighted_metrics}
        given = [name for name, value in others.items() if value]
        if given:
            raise ConfigError(
                f"objective=... determines what is minimised and measured; leave {' and '.join(given)} out, or the "
                "objective."
            )
        if not callable(make):
            raise ConfigError(f"objective={make!r}: give a function of the built model that returns an Objective.")
        return cls(make)

    def metric_names(self) -> list[str]:
        """Empty: there are no metric objects."""
        return []

    def check_names(self) -> None:
        """Does nothing: there are no names."""

    def objective(self, model: keras.Model) -> Objective:
        """The objective for a model.

        Raises:
          ConfigError: The result of `make` is not an objective.
        """
        made: Any = self.make(model)
        if not callable(made) or not hasattr(made, "totals"):
            raise ConfigError(
                f"objective=... made {made!r}, which is not a tfpar.training.objective.Objective: it must be callable "
                "and have `totals`."
            )
        return made

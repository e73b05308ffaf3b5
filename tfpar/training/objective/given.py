"""A user-defined objective in place of losses and metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfpar.config import ConfigError
from tfpar.training.objective.protocol import Objective, ObjectiveSums
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
        if hasattr(make, "totals") and not isinstance(make, type):
            kind = type(make).__name__
            raise ConfigError(
                f"objective={make!r} is an objective already. Give what makes one of the model that the trainer has "
                f"built: objective={kind}, or objective=lambda model: {kind}(model, ...)."
            )
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


def check_sums(sums: Any, objective: Objective) -> ObjectiveSums:
    """Returns what an objective has returned.

    Raises:
      ConfigError: It is not `ObjectiveSums`, or does not have as many metrics as `totals` has variables.
    """
    name = f"objective=... ({type(objective).__name__})"
    if not isinstance(sums, ObjectiveSums):
        raise ConfigError(
            f"{name} returned {sums!r}. Return tfpar.training.objective.ObjectiveSums(loss, count, state, metrics), "
            "sums over the examples of the batch."
        )
    expected = len(objective.totals.variables)
    if len(sums.metrics) != expected:
        raise ConfigError(
            f"{name} returned {len(sums.metrics)} metrics, and its totals have {expected} variables. Return one amount "
            "for each variable, in their order."
        )
    return sums

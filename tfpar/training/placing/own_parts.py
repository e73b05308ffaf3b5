"""The parts of a program for tasks other than supervised training: reinforcement learning, federations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.training.step import TrainStep

import keras


@dataclasses.dataclass(frozen=True, eq=False)
class OwnParts:
    """The parts that replace parts of `Program`, or are added to them.

    Attributes:
      step: The constructor to call in place of `TrainStep`, with the same arguments; or None.
      variables: Additional variables that a checkpoint must hold, by the prefix of their names.
      recorded: `(finished steps) -> scalars` to record for the last of these steps.
      summarized: `(finished steps) -> values` to add to `summary.json`.
      summed_elements: Number of float32 elements that replicas sum in a step in addition to the exchange.
    """

    step: Callable[..., TrainStep] | None = None
    variables: Mapping[str, Sequence[keras.Variable]] = dataclasses.field(default_factory=dict)
    recorded: Callable[[int], Mapping[str, float]] = lambda step: {}
    summarized: Callable[[int], Mapping[str, Any]] = lambda step: {}
    summed_elements: int = 0

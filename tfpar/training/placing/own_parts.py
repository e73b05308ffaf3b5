"""What a program has of its own, where it is no plain training: reinforcement learning, federations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.training.step import TrainStep

import keras


@dataclasses.dataclass(frozen=True, eq=False)
class OwnParts:
    """What takes the place of, or is added to, what `Program` has by itself.

    Attributes:
      step: What takes the arguments of `TrainStep` in its place, or None.
      variables: What a checkpoint must hold besides, by the prefix of their names.
      recorded: From a number of finished steps: scalars to record of the last one.
      summarized: From a number of finished steps: what `summary.json` has besides.
    """

    step: Callable[..., TrainStep] | None = None
    variables: Mapping[str, Sequence[keras.Variable]] = dataclasses.field(default_factory=dict)
    recorded: Callable[[int], Mapping[str, float]] = lambda step: {}
    summarized: Callable[[int], Mapping[str, Any]] = lambda step: {}

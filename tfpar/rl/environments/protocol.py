"""The protocol of environments on the device: pure functions of the state of many environments at once.

Shapes: n environments. A state is a structure of tensors `[n, ...]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

State = Any


@dataclasses.dataclass(frozen=True)
class Discrete:
    """An action space of several actions; an action is an int32 from 0 to `count - 1`.

    Attributes:
      count: Number of actions.
    """

    count: int

    @property
    def spec(self) -> tf.TensorSpec:
        """Shape and type of one action."""
        return tf.TensorSpec([], tf.int32)

    @property
    def outputs(self) -> int:
        """Number of a policy's outputs: one logit per action."""
        return self.count

    @property
    def text(self) -> str:
        """For reports."""
        return f"one of {self.count} actions"


@dataclasses.dataclass(frozen=True)
class Continuous:
    """An action space of float32 vectors; an environment clips actions to the bounds.

    Attributes:
      low: Lower bound of each number.
      high: Upper bound of each number.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def spec(self) -> tf.TensorSpec:
        """Shape and type of one action."""
        return tf.TensorSpec([len(self.low)], tf.float32)

    @property
    def outputs(self) -> int:
        """Number of a policy's outputs: one mean per number of the action."""
        return len(self.low)

    @property
    def text(self) -> str:
        """For reports."""
        return f"actions of {len(self.low)} numbers"


Actions = Discrete | Continuous


class Transition(NamedTuple):
    """The result of one step of n environments.

    Attributes:
      state: The states after the step.
      reward: Float `[n]`.
      terminated: Bool `[n]`: whether the episode terminated. (`vector.py` handles time limits.)
    """

    state: State
    reward: tf.Tensor
    terminated: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Environment:
    """An environment whose dynamics are pure functions, so that thousands run in one XLA program.

    The functions compute in the floating-point dtype of their state argument, `reset` in that of its random numbers.

    Attributes:
      name: The name for `--env`; the name in Gymnasium if it is the same environment.
      observation_shape: Shape of one observation, float32.
      actions: The action space.
      max_steps: Steps after which an episode is cut off.
      reset_numbers: Number of random numbers that `reset` takes.
      reset: `(numbers) -> state`; `numbers` are `reset_numbers` tensors `[n]`, uniform in [0, 1).
      step: `(state, action, numbers) -> Transition`; the action is int32 `[n]` or float32 `[n, size]`, `numbers` are
        `step_numbers` tensors `[n]`, uniform in [0, 1).
      observe: `(state) -> float32 [n, *observation_shape]`.
      step_numbers: Number of random numbers that `step` takes.
      render: `(observation) -> uint8 [height, width, 3]` for one observation, or None.
      goal: Mean return of an evaluation at which `--stop_at_goal` ends a run; None if there is no such return.
    """

    name: str
    observation_shape: tuple[int, ...]
    actions: Actions
    max_steps: int
    reset_numbers: int
    reset: Callable[[Sequence[tf.Tensor]], State]
    step: Callable[[State, tf.Tensor, Sequence[tf.Tensor]], Transition]
    observe: Callable[[State], tf.Tensor]
    step_numbers: int = 0
    render: Callable[[np.ndarray], np.ndarray] | None = None
    goal: float | None = None

    @property
    def observation_dtype(self) -> str:
        """The dtype of observations."""
        return "float32"


def stacked(*parts: tf.Tensor) -> tf.Tensor:
    """Stacks tensors `[n]` of a state to observations, float32 `[n, len(parts)]`."""
    return tf.stack([tf.cast(part, tf.float32) for part in parts], axis=-1)

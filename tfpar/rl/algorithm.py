"""The protocol of algorithms: how a replica gathers experience, and how it becomes batches.

The training step gets its batches from an algorithm and is otherwise that of supervised learning; it minimises the
algorithm's `Objective`. Everything here is a pure function of tensors, so that XLA compiles it with the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tfpar.config import ReinforcementConfig
from tfpar.rl.rollout import Choice, Step
from tfpar.training.objective import Batch, Objective, Tensors

import keras
import tensorflow as tf


class Algorithm(Protocol):
    """How experience becomes batches."""

    @property
    def model(self) -> keras.Model:
        """The policy."""

    @property
    def options(self) -> ReinforcementConfig:
        """The options of learning: the size of a rollout, and the number of steps that learn from it."""

    @property
    def own_state(self) -> Sequence[int]:
        """Indices of the model's non-trainable variables that gathering changes, in the same way on every replica."""

    @property
    def objective(self) -> Objective:
        """What is minimised."""

    def initial_memory(self, replica: int) -> Any:
        """The memory of a replica before the first step: a structure of tensors with static shapes.

        Args:
          replica: Its index among all replicas.
        """

    def gather(
        self, params: Tensors, state: Tensors, memory: Any, step: tf.Tensor, replica: tf.Tensor
    ) -> tuple[Tensors, Any]:
        """Acts in the environments of a replica.

        Args:
          params: Values of the model's trainable variables.
          state: Values of its non-trainable variables.
          memory: The memory of the replica, in the structure of `initial_memory`.
          step: Int64 scalar: the number of the training step that is about to begin.
          replica: Int32 scalar: the number of the replica.

        Returns:
          The new state and the new memory.
        """

    # The same in three parts, for environments that run on the host.

    def prepare(self, state: Tensors) -> Tensors:
        """The values of the non-trainable variables for learning from a rollout."""

    def choose(
        self,
        params: Tensors,
        state: Tensors,
        observation: tf.Tensor,
        *,
        index: tf.Tensor,
        time: tf.Tensor,
        step: tf.Tensor,
    ) -> Choice:
        """The actions in some environments.

        Args:
          params: Values of the model's trainable variables.
          state: Values of its non-trainable variables, from `prepare`.
          observation: Float32 `[n, ...]`.
          index: Int32 `[n]`: numbers of the environments among all.
          time: Int32 scalar: the number of the step of these environments.
          step: Int64 scalar: the number of the first training step that will learn from it.
        """

    def remember(self, params: Tensors, state: Tensors, memory: Any, taken: Step, step: tf.Tensor) -> Any:
        """The memory with the results of `rollout_steps` steps of all environments of a replica."""

    def batch(self, memory: Any, step: tf.Tensor, replica: tf.Tensor) -> Batch:
        """The batch of a step on a replica: `(x, y, weight)` with a leading micro-batch axis; arguments as above."""

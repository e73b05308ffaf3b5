"""The protocol of algorithms: how a replica gathers experience, and how the experience becomes batches.

The training step gets its batches and its `Objective` from an algorithm, and is otherwise that of supervised learning.
All functions of an algorithm are pure functions of tensors, so that XLA compiles them with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tfpar.config import ReinforcementConfig
from tfpar.rl.rollout import Choice, Step
from tfpar.training.objective import Batch, Objective, Tensors

import keras
import tensorflow as tf


class Algorithm(Protocol):
    """Gathers experience, and makes batches from it."""

    @property
    def model(self) -> keras.Model:
        """The model of the policy."""

    @property
    def options(self) -> ReinforcementConfig:
        """The options, such as the size of a rollout and the number of steps that learn from it."""

    @property
    def own_state(self) -> Sequence[int]:
        """Indices of the model's non-trainable variables that gathering changes, in the same way on every replica."""

    @property
    def objective(self) -> Objective:
        """The objective that a step minimises."""

    def initial_memory(self, replica: int) -> Any:
        """Returns the memory of a replica before the first step: a structure of tensors with static shapes.

        Args:
          replica: Index of the replica among all replicas.
        """

    def with_episodes_cut_off(self, memory: Any) -> Any:
        """Returns the memory of a replica after its environments have abandoned their episodes and begun new ones."""

    def gather(
        self, params: Tensors, state: Tensors, memory: Any, step: tf.Tensor, replica: tf.Tensor
    ) -> tuple[Tensors, Any]:
        """Acts in the environments of a replica.

        Args:
          params: Values of the model's trainable variables.
          state: Values of its non-trainable variables.
          memory: The memory of the replica, in the structure of `initial_memory`.
          step: Int64 scalar: the number of the training step that is about to begin.
          replica: Int32 scalar: the index of the replica.

        Returns:
          The new state and the new memory.
        """

    # `gather` in three parts, for environments that run on the host.

    def prepare(self, state: Tensors) -> Tensors:
        """Returns the values of the non-trainable variables that a rollout, and learning from it, use."""

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
        """Chooses actions in some environments.

        Args:
          params: Values of the model's trainable variables.
          state: Values of its non-trainable variables, from `prepare`.
          observation: Float32 `[n, ...]`.
          index: Int32 `[n]`: indices of the environments among those of all replicas.
          time: Int32 scalar: the number of the environments' step.
          step: Int64 scalar: the number of the first training step that will learn from these actions.
        """

    def remember(self, params: Tensors, state: Tensors, memory: Any, taken: Step, step: tf.Tensor) -> Any:
        """Returns the memory with the results of `rollout_steps` steps of all environments of a replica added.

        The observations have the environment's `observation_dtype`.
        """

    @property
    def noted_fields(self) -> Sequence[str]:
        """Names of fields of the memory, each a single tensor, that change once a batch has been drawn; may be empty.

        An example are priorities of transitions, which follow their errors.
        """

    def noted(
        self, params: Tensors, state: Tensors, memory: Any, batch: Batch, step: tf.Tensor, replica: tf.Tensor
    ) -> Tensors:
        """Returns the new values of `noted_fields`, under the weights before the step; not called if there are none.

        Args:
          params: Values of the model's trainable variables.
          state: Values of its non-trainable variables.
          memory: The memory from which the batch was drawn.
          batch: The batch of this step and replica.
          step: The number of the step.
          replica: The index of the replica.
        """

    def batch(self, memory: Any, step: tf.Tensor, replica: tf.Tensor) -> Batch:
        """Returns the batch of a step on a replica: `(x, y, weight)` with a leading micro-batch dim.

        The arguments are those of `gather`.
        """

    def scales(self, batch: Batch, total: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        """Returns what the objective takes as `scales`, or None: values of the whole batch, equal on all replicas.

        Args:
          batch: The batch of this step and replica.
          total: Sums a tensor over all replicas; every replica calls it equally often.
        """

"""The training step that creates its own batches: it acts if a new rollout is due, then trains like any other step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.collectives.replicas import sum_over_replicas
from tfpar.collectives.tensorflow import PER_WORKER
from tfpar.parallel import replica
from tfpar.precision import LossScale
from tfpar.rl.actors import Actors
from tfpar.rl.algorithm import Algorithm
from tfpar.training.objective import Batch, Tensors
from tfpar.training.step import TrainStep, compiled
from tfpar.training.step_loop import StepReport

import numpy as np
import tensorflow as tf

MEMORY = "input/memory"  # prefix of the memory's arrays in a checkpoint


class _Held(NamedTuple):
    """A variable with one copy per replica, which `tfpar.parallel.replica` can look up."""

    value: tf.Variable


class AgentMemory:
    """The memories of the replicas of this process: a variable for each tensor, with a copy on every replica.

    Args:
      algorithm: Defines the memory.
      strategy: The running strategy.
      first: Index of this process's first replica among those of all workers.

    Attributes:
      structure: The shapes and dtypes of the memory of a replica, in the structure of `Algorithm.initial_memory`.
    """

    def __init__(self, algorithm: Algorithm, strategy: tf.distribute.Strategy, *, first: int) -> None:
        self._strategy = strategy
        # Traced, not run: a replay is large, and its variables have it.
        made = tf.function(lambda: algorithm.initial_memory(first), autograph=False).get_concrete_function()
        self.structure = tf.nest.map_structure(
            lambda part: tf.TensorSpec(part.shape, part.dtype), made.structured_outputs
        )
        self._first, self._algorithm = first, algorithm
        self._types = [part.dtype for part in tf.nest.flatten(self.structure)]
        with strategy.scope():
            self._ready = _held([], tf.int64)
            self._held = [_held(part.shape, _stored_dtype(part.dtype)) for part in tf.nest.flatten(self.structure)]
        self.forget()

    def forget(self) -> None:
        """Resets the memories to those before the first step."""
        for place, copies in enumerate(zip(*map(self._copies, [self._ready, *self._held]), strict=True)):
            fresh = tf.nest.flatten(self._algorithm.initial_memory(self._first + place))
            for copy, value in zip(copies, [tf.zeros([], tf.int64), *map(_storable, fresh)], strict=True):
                copy.assign(value)

    def _copies(self, held: _Held) -> tuple[Any, ...]:
        return self._strategy.experimental_local_results(held.value)

    def replace(self, memories: Sequence[Any]) -> None:
        """Replaces the memory of each replica of this process with one in the structure of `structure`."""
        for place, memory in enumerate(memories):
            values = [tf.ones([], tf.int64), *map(_storable, tf.nest.flatten(memory))]
            for held, value in zip([self._ready, *self._held], values, strict=True):
                self._copies(held)[place].assign(value)

    # In a replica context.

    def ready(self) -> tf.Tensor:
        """Whether anything has been gathered yet, bool scalar."""
        return tf.not_equal(replica.read([self._ready])[0], 0)

    def read(self) -> Any:
        """Returns the memory of this replica, in the structure of `Algorithm.initial_memory`."""
        return self._in_structure(replica.read(self._held))

    def _in_structure(self, stored: Sequence[Any]) -> Any:
        """Returns the memory whose tensors are stored in these values."""
        values = [tf.cast(value, kind) for value, kind in zip(stored, self._types, strict=True)]
        return tf.nest.pack_sequence_as(self.structure, values)

    def assign(self, memory: Any) -> list[tf.Operation]:
        """Replaces this replica's memory; returns the assignments."""
        values = [tf.ones([], tf.int64), *map(_storable, tf.nest.flatten(memory))]
        return replica.assign(replica.own([self._ready, *self._held]), values)

    def assign_field(self, name: str, value: tf.Tensor) -> tf.Operation:
        """Replaces one field, a single tensor, of this replica's memory; returns the assignment."""
        fields = self.structure._fields
        before = [getattr(self.structure, field) for field in fields[: fields.index(name)]]
        held = self._held[len(tf.nest.flatten(before))]
        [assigned] = replica.assign(replica.own([held]), [_storable(value)])
        return assigned

    # In a checkpoint.

    def export(self) -> dict[str, np.ndarray]:
        """Returns the memories of this process: arrays with one row per replica."""
        return {f"{MEMORY}/{place}": _rows(self._copies(one)) for place, one in enumerate([self._ready, *self._held])}

    def restore(self, saved: Mapping[str, np.ndarray], *, new_episodes: bool = False) -> bool:
        """Restores the result of `export`; returns False, and changes nothing, if it has another structure.

        Args:
          saved: The result of `export`.
          new_episodes: Whether the environments begin new episodes because their state was not saved.
        """
        held = [self._ready, *self._held]
        rows = [saved.get(f"{MEMORY}/{place}") for place in range(len(held))]
        copies = [self._copies(one) for one in held]
        if any(
            array is None or array.shape != (len(own), *own[0].shape) for array, own in zip(rows, copies, strict=True)
        ):
            return False
        for array, own in zip(rows, copies, strict=True):
            for copy, value in zip(own, array, strict=True):  # type: ignore[arg-type]
                copy.assign(tf.cast(value, copy.dtype))  # older checkpoints have pixels as float32
        if new_episodes:
            memories = map(self._in_structure, zip(*copies[1:], strict=True))
            self.replace([self._algorithm.with_episodes_cut_off(memory) for memory in memories])
        return True


def _rows(copies: Sequence[tf.Variable]) -> np.ndarray:
    """Returns the values of a variable on each replica, with no further copy of more than one of them: each is as large
    as a replay."""
    if len(copies) == 1:
        return copies[0].numpy()[np.newaxis]  # which is a copy
    rows = np.empty([len(copies), *copies[0].shape], copies[0].dtype.as_numpy_dtype)
    for place, copy in enumerate(copies):
        rows[place] = copy.numpy()
    return rows


def _held(shape: Sequence[int], dtype: tf.DType) -> _Held:
    return _Held(tf.Variable(tf.zeros(shape, dtype), trainable=False, **PER_WORKER))


def _stored_dtype(dtype: tf.DType) -> tf.DType:
    """Returns a dtype whose variables can be on a GPU: int32 variables are on the host (TensorFlow 2.21)."""
    return tf.int64 if dtype == tf.int32 else dtype


def _storable(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, _stored_dtype(value.dtype))


class ActingStep(TrainStep):
    """`TrainStep` whose batches come from an algorithm's memory.

    Args:
      algorithm: Defines the memory and the batches.
      memory: The memories of the replicas of this process.
      actors: The actors of an environment that runs on the host; None if it runs on the device.
      *arguments: As for `TrainStep`.
      **options: As for `TrainStep`.
    """

    # All batches have the same number of examples.
    decision = property(lambda self: self.sidecar.should_apply, doc="See `TrainStep`.")

    def __init__(
        self, algorithm: Algorithm, memory: AgentMemory, actors: Actors | None, *arguments: Any, **options: Any
    ) -> None:
        self._algorithm, self._memory, self._actors = algorithm, memory, actors
        self.waits_for_host = actors is not None
        super().__init__(*arguments, **options)

    def _make_programs(self) -> None:
        super()._make_programs()
        self._gather = compiled(self._algorithm.gather, self.plan.compiles_gradients)
        self._remember = compiled(self._algorithm.remember, self.plan.compiles_gradients)
        self._batch = compiled(self._algorithm.batch, self.plan.compiles_gradients)
        self._noted = compiled(self._algorithm.noted, self.plan.compiles_gradients)

    def next_batch(self, iterator: Iterator[Any]) -> Any:
        """Returns nothing: each replica creates its own batch."""
        del iterator
        return ()

    def _replica_step(
        self, batch: Any, step: tf.Tensor, lr_multiplier: tf.Tensor, loss_scale: LossScale, wants_norm: tf.Tensor | None
    ) -> StepReport:
        """Acts if that is due, and trains on the batch of this step."""
        del batch
        made, gathered = self._made_batch(step)
        with tf.control_dependencies([gathered]):
            return super()._replica_step(made, step, lr_multiplier, loss_scale, wants_norm)

    def _loss_scales(self, params: Tensors, state: Tensors, batch: Batch) -> Any:
        """Returns `Algorithm.scales`: they depend on the batch alone, so no model is called for them."""
        del params, state
        return self._algorithm.scales(batch, sum_over_replicas)

    def _made_batch(self, step: tf.Tensor) -> tuple[Batch, tf.Tensor]:
        """Returns the batch of a step on this replica, and a tensor to wait for the end of gathering."""
        number = self._replica_number(tf.distribute.get_replica_context())
        model, memory = self.core.model, self._memory
        due = tf.equal(step % self._algorithm.options.steps_per_rollout, 0) | ~memory.ready()

        def gather() -> tf.Tensor:
            params, state = replica.read(model.trainable_variables), replica.read(model.non_trainable_variables)
            new_state, remembered = self._gathered(params, state, step, number)
            stored = [*memory.assign(remembered), *self._assign_state(new_state)]
            with tf.control_dependencies(stored):
                return tf.identity(step)

        gathered = tf.cond(due, gather, lambda: tf.identity(step))
        with tf.control_dependencies([gathered]):
            remembered = memory.read()
            batch = self._batch(remembered, step, number)
            return batch, self._note(remembered, batch, step, number) if self._algorithm.noted_fields else gathered

    def _note(self, memory: Any, batch: Batch, step: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Updates the fields of the memory that change with a batch; returns a tensor to wait for the update."""
        model = self.core.model
        params, state = replica.read(model.trainable_variables), replica.read(model.non_trainable_variables)
        values = self._noted(params, state, memory, batch, step, number)
        noted = zip(self._algorithm.noted_fields, values, strict=True)
        with tf.control_dependencies([self._memory.assign_field(name, value) for name, value in noted]):
            return tf.identity(step)

    def _gathered(self, params: Tensors, state: Tensors, step: tf.Tensor, number: tf.Tensor) -> tuple[Tensors, Any]:
        """Returns the new state and the new memory."""
        algorithm = self._algorithm
        if self._actors is None:
            gathered: tuple[Tensors, Any] = self._gather(params, state, self._memory.read(), step, number)
            return gathered
        state = algorithm.prepare(state)
        taken = self._actors.take(params, state, step // algorithm.options.steps_per_rollout, number)
        return state, self._remember(params, state, self._memory.read(), taken, step)

    def _assign_state(self, values: Tensors) -> list[tf.Operation]:
        places = self._algorithm.own_state
        variables = [self.core.model.non_trainable_variables[place] for place in places]
        return replica.assign(replica.own(variables), [values[place] for place in places])

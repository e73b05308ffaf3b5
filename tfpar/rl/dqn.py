"""Deep Q-learning (Mnih et al. 2015) with double Q-learning (van Hasselt et al. 2016) and n-step targets (as in Hessel
et al. 2018, Rainbow). The replay is on the device, in the variables of the replica that gathered it. Transitions can be
drawn with probabilities that depend on their errors (Schaul et al. 2016, Prioritized Experience Replay, proportional
variant).

A step draws the same number of stored transitions from each environment, so it does not depend on how the environments
are split over replicas.

Shapes: L time steps in the replay, T time steps of a rollout, n environments of a replica, k transitions of each
environment in a training step, A micro-batches, m transitions of a micro-batch on a replica.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.config import ReinforcementConfig
from tfpar.rl import noise, vector
from tfpar.rl.environments import AnyEnvironment, Environment
from tfpar.rl.rollout import Choice, Step, act_for
from tfpar.rl.sums import NamedSums, totals_of
from tfpar.rl.vector import Vector
from tfpar.training.model.call import call_model
from tfpar.training.objective import Batch, ObjectiveSums, Tensors
from tfpar.training.seeds import run_seed

import keras
import tensorflow as tf

_LEAST_ERROR = 1e-3  # added to errors, so that every transition can be drawn again


class Replay(NamedTuple):
    """Transitions `[L, n]`; time step t is in slot t % L.

    Attributes:
      observation: `[L, n, ...]` in the environment's `observation_dtype`.
      action: Int32.
      reward: Float32, scaled.
      following: Like `observation`: the observation after the action, before any new episode.
      terminated: Float32: 1 where the episode terminated.
      ended: Float32: 1 where the episode ended or was cut off.
    """

    observation: tf.Tensor
    action: tf.Tensor
    reward: tf.Tensor
    following: tf.Tensor
    terminated: tf.Tensor
    ended: tf.Tensor


def replay_specs(options: ReinforcementConfig, environment: AnyEnvironment, environments: int) -> Replay:
    """Returns the shapes and dtypes of the replay of a number of environments.

    L is a multiple of T, so that the time steps of a rollout never wrap around.
    """
    slots = options.replay_size // options.transitions_per_rollout * options.rollout_steps
    shape = [slots, environments]
    observed = tf.TensorSpec([*shape, *environment.observation_shape], environment.observation_dtype)
    number = tf.TensorSpec(shape, tf.float32)
    return Replay(
        observation=observed,
        action=tf.TensorSpec(shape, tf.int32),
        reward=number,
        following=observed,
        terminated=number,
        ended=number,
    )


class Memory(NamedTuple):
    """The memory of a replica.

    Attributes:
      vector: The states of its environments; `()` if they run on the host.
      replay: Their transitions.
      written: Int32 scalar: time steps gathered so far.
      target: Weights of the target network.
      episodes: Float32 `[3]`: of the episodes that ended in the last rollout, their number, the sum of their returns,
        and the sum of their lengths.
      priority: Float32 `[L, n]`: a power of the transition's error, to which its probability is proportional; `()` if
        transitions are drawn uniformly.
    """

    vector: Vector | tuple[()]
    replay: Replay
    written: tf.Tensor
    target: Tensors
    episodes: tf.Tensor
    priority: tf.Tensor | tuple[()] = ()


class Targets(NamedTuple):
    """The targets of a micro-batch `[m]`.

    Attributes:
      action: Int32: the actions.
      reward: Float32: the discounted rewards of n steps, or of those until the episode ended.
      following: Float32 `[m, ...]`: the observations after them.
      discount: Float32: the discount of the value of `following`; 0 where the episode terminated.
      values: Float32 `[m, a]`: the target network's values of `following`.
      episodes: Float32 `[m, 3]`: a share of `Memory.episodes` in the first training step after a rollout, else 0.
      place: Int32: the transitions' indices among the L x n of the replay.
    """

    action: tf.Tensor
    reward: tf.Tensor
    following: tf.Tensor
    discount: tf.Tensor
    values: tf.Tensor
    episodes: tf.Tensor
    place: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class DQN:
    """Deep Q-learning, an `Algorithm`.

    Attributes:
      model: Maps observations to the values of all actions, `[m, a]`.
      environment: The environment; its actions are discrete.
      options: The options of reinforcement learning.
      seed: Seed of the run.
      total_steps: Steps of the whole run; the rate of exploration decreases over them.
      replicas: Number of replicas of all workers.
      accumulate_steps: Number of micro-batches of a step, A.
      also_reported: Returns further figures to report.
    """

    model: keras.Model
    environment: AnyEnvironment
    options: ReinforcementConfig
    seed: int
    total_steps: int
    replicas: int = 1
    accumulate_steps: int = 1
    also_reported: Callable[[], Mapping[str, float]] = dict

    @property
    def own_state(self) -> Sequence[int]:
        """Empty: acting does not change the model."""
        return ()

    @functools.cached_property
    def objective(self) -> DQNObjective:
        """The objective that a step minimises."""
        return DQNObjective(self.model, self.also_reported)

    @property
    def _own(self) -> int:
        return self.options.environments // self.replicas

    @property
    def _slots(self) -> int:
        """L."""
        return int(replay_specs(self.options, self.environment, self._own).reward.shape[0])

    def _index(self, replica: Any) -> tf.Tensor:
        return replica * self._own + tf.range(self._own)

    def initial_memory(self, replica: int) -> Memory:
        """Returns environments at the start of their first episodes, an empty replay, and a target network of zeros."""
        specs = replay_specs(self.options, self.environment, self._own)
        replay = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)
        start = vector.first(self.environment, run_seed(self.seed), self._index(replica))
        target = [tf.zeros(variable.shape) for variable in self.model.trainable_variables]
        priority = tf.zeros_like(replay.reward) if self.options.replay_priority else ()
        return Memory(start, replay, tf.constant(0), target, tf.zeros([3]), priority)

    def with_episodes_cut_off(self, memory: Memory) -> Memory:
        """Marks the last transitions as the end of their episodes, like a time limit: no n-step return crosses them."""
        last = (memory.written - 1) % self._slots
        ended = tf.tensor_scatter_nd_update(memory.replay.ended, [[last]], tf.ones([1, self._own]))
        return memory._replace(replay=memory.replay._replace(ended=ended))

    def gather(
        self, params: Tensors, state: Tensors, memory: Memory, step: tf.Tensor, replica: tf.Tensor
    ) -> tuple[Tensors, Memory]:
        """Runs `rollout_steps` steps in every environment."""
        index = self._index(replica)

        def choose(observation: tf.Tensor, number: tf.Tensor) -> Choice:
            return self.choose(params, state, observation, index=index, time=number, step=step)

        assert isinstance(self.environment, Environment)
        assert isinstance(memory.vector, Vector)
        # Uses the number of stored steps, not the step number: a run may resume elsewhere with an empty memory.
        end, taken = act_for(
            self.environment,
            choose,
            memory.vector,
            steps=self.options.rollout_steps,
            seed=run_seed(self.seed),
            index=index,
            time=memory.written,
            reward_scale=self.options.reward_scale,
        )
        return state, self.remember(params, state, memory._replace(vector=end), taken, step)

    def prepare(self, state: Tensors) -> Tensors:
        """Returns `state`: gathering does not change the model."""
        return state

    def choose(
        self, params: Tensors, state: Tensors, observation: tf.Tensor, *, index: tf.Tensor, time: tf.Tensor, step: Any
    ) -> Choice:
        """Chooses the actions of the greatest values, or random ones with a probability that decreases over the run."""
        options = self.options
        progress = tf.cast(step, tf.float32) / max(self.total_steps * options.explore_share, 1.0)
        explore = 1.0 + tf.minimum(progress, 1.0) * (options.explore_end - 1.0)
        values, _ = _action_values(self.model, params, state, observation)
        drawn = noise.uniforms(2, seed=run_seed(self.seed), stream=noise.ACTION, index=index, time=time)
        at_random = tf.cast(drawn[1] * float(values.shape[-1]), tf.int32)
        action = tf.where(drawn[0] < explore, at_random, tf.argmax(values, axis=-1, output_type=tf.int32))
        return Choice(action, tf.zeros_like(drawn[0]), tf.zeros_like(drawn[0]))

    def remember(self, params: Tensors, state: Tensors, memory: Memory, taken: Step, step: tf.Tensor) -> Memory:
        """Replaces the oldest transitions; updates the target network if it is due."""
        del state
        options, steps = self.options, self.options.rollout_steps
        slots = (memory.written + tf.range(steps)) % self._slots
        new = Replay(taken.observation, taken.action, taken.reward, taken.following, taken.terminated, taken.ended)
        replay = tf.nest.map_structure(
            lambda kept, part: tf.tensor_scatter_nd_update(kept, slots[:, tf.newaxis], part), memory.replay, new
        )
        due = tf.equal(memory.written, 0) | (step % options.target_every < options.steps_per_rollout)
        target = [tf.where(due, param, old) for param, old in zip(params, memory.target, strict=True)]
        episodes = [tf.reduce_sum(part) for part in (taken.ended, taken.episode_return, taken.episode_length)]
        priority = memory.priority
        if tf.is_tensor(priority):  # the largest so far, so that each new transition is drawn soon
            # Computed separately for each environment, so that the result does not depend on their split over replicas.
            largest = tf.maximum(tf.reduce_max(priority, axis=0, keepdims=True), 1.0)
            new_ones = tf.broadcast_to(largest, [steps, self._own])
            priority = tf.tensor_scatter_nd_update(priority, slots[:, tf.newaxis], new_ones)
        return Memory(memory.vector, replay, memory.written + steps, target, tf.stack(episodes), priority)

    def batch(self, memory: Memory, step: tf.Tensor, replica: tf.Tensor) -> Batch:
        """Draws k stored transitions of each environment, different ones in every step."""
        options, slots = self.options, self._slots
        first, weight = self._drawn(memory, step, replica)

        def places(later: int) -> tf.Tensor:
            return tf.reshape((first + later) % slots * self._own + tf.range(self._own), [-1])

        def of(kept: tf.Tensor, later: int) -> tf.Tensor:
            return tf.gather(tf.reshape(kept, [slots * self._own, *kept.shape[2:]]), places(later))

        size = options.replay_batch // options.environments * self._own
        reward, alive, discount = tf.zeros([size]), tf.ones([size]), tf.ones([size])

        def observed(kept: tf.Tensor, later: int) -> tf.Tensor:
            return tf.cast(of(kept, later), tf.float32)

        following = observed(memory.replay.following, 0)
        for later in range(options.n_step):
            lives = tf.reshape(alive, [-1, *[1] * (following.shape.rank - 1)]) > 0.0
            reward += alive * discount * of(memory.replay.reward, later)
            following = tf.where(lives, observed(memory.replay.following, later), following)
            goes_on = options.discount * (1.0 - of(memory.replay.terminated, later))
            discount = tf.where(alive > 0.0, discount * goes_on, discount)
            alive *= 1.0 - of(memory.replay.ended, later)
        state = [tf.convert_to_tensor(variable) for variable in self.model.non_trainable_variables]
        values, _ = _action_values(self.model, memory.target, state, following)
        is_first = tf.cast(tf.equal(step % self.options.steps_per_rollout, 0), tf.float32)
        episodes = tf.broadcast_to(is_first * memory.episodes / float(size), [size, 3])
        parts = Targets(of(memory.replay.action, 0), reward, following, discount, values, episodes, places(0))
        rows = [self.accumulate_steps, size // self.accumulate_steps]
        batch: Batch = tf.nest.map_structure(
            lambda part: tf.reshape(part, [*rows, *part.shape[1:]]),
            (observed(memory.replay.observation, 0), parts, tf.reshape(weight, [-1])),
        )
        return batch

    def _drawn(self, memory: Memory, step: tf.Tensor, replica: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the time steps at which the drawn transitions begin, int32 `[k, n]`, and their weights, float32."""
        options, slots = self.options, self._slots
        each = options.replay_batch // options.environments
        drawn = noise.uniforms(
            each,
            seed=run_seed(self.seed),
            stream=noise.REPLAY,
            index=self._index(replica),
            time=tf.cast(step, tf.int32),
        )
        known = tf.minimum(memory.written, slots)
        begins = tf.cast(known - options.n_step + 1, tf.float32)
        if not tf.is_tensor(memory.priority):
            first = memory.written - known + tf.cast(tf.stack(drawn) * begins, tf.int32)
            return first, tf.ones([each, self._own])
        age = (memory.written - 1 - tf.range(slots)) % slots
        complete = (age >= options.n_step - 1) & (age < known)  # the sum over n steps needs the steps after it
        priority = tf.where(complete[:, tf.newaxis], memory.priority, 0.0)
        ends = tf.cumsum(priority)  # [L, n]
        total = ends[-1]
        # Draws one transition from each of k strata of equal total priority.
        places = (tf.stack(drawn) + tf.range(float(each))[:, tf.newaxis]) / float(each) * total
        slot = noise.upper_bound(ends, places)  # [k, n]
        slot = tf.minimum(slot, tf.reduce_max(tf.where(complete, tf.range(slots), 0)))  # rounding can exceed the last
        column = tf.broadcast_to(tf.range(self._own), slot.shape)
        odds = tf.gather_nd(priority, tf.stack([slot, column], axis=-1)) / total
        beta = options.replay_correction
        beta += (1.0 - beta) * tf.minimum(tf.cast(step, tf.float32) / max(self.total_steps, 1), 1.0)
        return memory.written - 1 - tf.gather(age, slot), tf.pow(tf.maximum(odds * begins, 1e-8), -beta)

    def scales(self, batch: Batch, total: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Returns nothing: the loss does not depend on the rest of the batch."""
        del batch, total

    @property
    def noted_fields(self) -> Sequence[str]:
        """The priorities, if transitions have any."""
        return ("priority",) if self.options.replay_priority > 0.0 else ()

    def noted(
        self, params: Tensors, state: Tensors, memory: Memory, batch: Batch, step: tf.Tensor, replica: tf.Tensor
    ) -> Tensors:
        """Returns `Memory.priority` after updating the drawn transitions' errors, under the weights before the step."""
        del step, replica
        x, targets, _ = tf.nest.map_structure(lambda part: tf.reshape(part, [-1, *part.shape[2:]]), batch)
        values, _ = _action_values(self.model, params, state, x)
        error = tf.abs(self.objective.errors(params, state, values, targets))
        places = tf.stack([targets.place // self._own, targets.place % self._own], axis=-1)
        # The step of such an error is skipped, but a priority that is not finite would decide all later draws.
        error = tf.where(tf.math.is_finite(error), error, 0.0)
        powers = tf.pow(error + _LEAST_ERROR, self.options.replay_priority)
        return [tf.tensor_scatter_nd_update(memory.priority, places, powers)]


class DQNObjective:
    """The Huber loss of the difference between values and targets.

    In the target, the current network chooses the action and the target network values it (van Hasselt et al. 2016,
    equation 4).

    Args:
      model: Maps observations to the values of all actions.
      also_reported: Returns further figures to report.
    """

    def __init__(self, model: keras.Model, also_reported: Callable[[], Mapping[str, float]] = dict) -> None:
        self._model = model
        self.totals = totals_of(_SUMS, lambda sums: {**_results(sums), **also_reported()})

    def __call__(
        self, params: Tensors, state: Tensors, batch: Batch, *, training: bool, scales: tf.Tensor | None = None
    ) -> ObjectiveSums:
        """See `Objective`."""
        del scales
        x, targets, weight = batch
        values, new_state = _action_values(self._model, params, state, x, training=training)
        value = tf.reduce_sum(tf.one_hot(targets.action, values.shape[-1]) * values, axis=-1)
        error = tf.abs(self.errors(params, state, values, targets))
        loss = tf.where(error < 1.0, 0.5 * error * error, error - 0.5)
        # Shares of a count, which the importance weights of transitions do not concern.
        episodes = tf.unstack(targets.episodes, axis=-1)
        named = {"value": weight * value, "error": weight * error, "count": weight}
        sums = NamedSums(named | dict(zip(("episodes", "return", "length"), episodes, strict=True)))
        return ObjectiveSums(tf.reduce_sum(weight * loss), tf.reduce_sum(weight), new_state, sums.in_order(_SUMS))

    def errors(self, params: Tensors, state: Tensors, values: tf.Tensor, targets: Targets) -> tf.Tensor:
        """Returns the actions' values minus their targets, float32 `[m]`; the targets are not differentiated.

        Args:
          params: Values of the model's trainable variables.
          state: Values of its non-trainable variables.
          values: Values of all actions before the step, `[m, a]`.
          targets: The targets of the micro-batch.
        """
        ahead, _ = _action_values(self._model, params, state, targets.following)
        chosen = tf.one_hot(tf.argmax(ahead, axis=-1), values.shape[-1])
        target = targets.reward + targets.discount * tf.reduce_sum(chosen * targets.values, axis=-1)
        value = tf.reduce_sum(tf.one_hot(targets.action, values.shape[-1]) * values, axis=-1)
        return value - tf.stop_gradient(target)


def _action_values(
    model: keras.Model, params: Tensors, state: Tensors, x: tf.Tensor, *, training: bool = False
) -> tuple[tf.Tensor, Tensors]:
    """Returns the values of all actions, float32 `[m, a]` whatever the precision of the model, and its new state."""
    values, new_state, _ = call_model(model, params, state, x, training=training)
    return tf.cast(values, tf.float32), list(new_state)


_SUMS = ("value", "error", "count", "episodes", "return", "length")


def _results(sums: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    if sums["episodes"] > 0.5:
        found = {name: sums[name] / sums["episodes"] for name in ("return", "length")}
    return found | {name: sums[name] / max(sums["count"], 1.0) for name in ("value", "error")}

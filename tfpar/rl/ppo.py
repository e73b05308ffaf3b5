"""Proximal policy optimisation (Schulman et al. 2017), with the choices of Andrychowicz et al. (2021).

The policy learns in several epochs from a rollout of T steps in n environments of a replica. An epoch is a permutation
of the time steps, rotated by a random amount for each environment, and divided into minibatches. So each minibatch has
the same number of transitions of every environment, for any split of the environments over replicas.

Shapes: A micro-batches, m transitions of a micro-batch on a replica.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfpar.config import ReinforcementConfig
from tfpar.rl import noise, vector
from tfpar.rl.environments import AnyEnvironment, Environment
from tfpar.rl.normalization import Statistics
from tfpar.rl.policy import Distribution, value_of
from tfpar.rl.rollout import Choice, Experience, Step, draw, judge, roll_out, values_of
from tfpar.rl.sums import NamedSums, Scales, totals_of
from tfpar.rl.vector import Vector
from tfpar.training.model.call import call_model
from tfpar.training.objective import Batch, ObjectiveSums, Tensors
from tfpar.training.seeds import run_seed

import keras
import tensorflow as tf


class Memory(NamedTuple):
    """The memory of a replica.

    Attributes:
      vector: The states of its environments; `()` if they run on the host.
      experience: The last rollout.
    """

    vector: Vector | tuple[()]
    experience: Experience


class Targets(NamedTuple):
    """The targets of a micro-batch `[m]`.

    Attributes:
      experience: The transitions, without their observations.
      share: Float32: in the first epoch, the fraction that each transition is of all transitions of the rollout on this
        replica; otherwise 0.
    """

    experience: Experience
    share: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class PPO:
    """Proximal policy optimisation, an `Algorithm`.

    Attributes:
      model: The policy.
      environment: The environment in which it acts.
      options: The options of reinforcement learning.
      seed: Seed of the run.
      replicas: Number of replicas of all workers.
      accumulate_steps: Number of micro-batches of a step, A.
      also_reported: Returns further figures to report.
    """

    model: keras.Model
    environment: AnyEnvironment
    options: ReinforcementConfig
    seed: int
    replicas: int = 1
    accumulate_steps: int = 1
    also_reported: Callable[[], Mapping[str, float]] = dict

    @functools.cached_property
    def statistics(self) -> Statistics:
        """The running statistics of the observations."""
        return Statistics(self.model)

    @property
    def own_state(self) -> Sequence[int]:
        """Indices of these statistics among the model's non-trainable variables."""
        return self.statistics.variables

    @functools.cached_property
    def objective(self) -> PPOObjective:
        """The objective that a step minimises."""
        return PPOObjective(self.model, self.options, self.statistics, self.also_reported)

    @property
    def _own(self) -> int:
        """Number of environments of a replica, n."""
        return self.options.environments // self.replicas

    def _index(self, replica: Any) -> tf.Tensor:
        return replica * self._own + tf.range(self._own)

    def initial_memory(self, replica: int) -> Memory:
        """Returns environments at the start of their first episodes, and no experience."""
        action, shape = self.environment.actions.spec, [self.options.rollout_steps, self._own]
        others = {name: tf.zeros(shape) for name in Experience._fields if name not in ("observation", "action")}
        experience = Experience(
            observation=tf.zeros([*shape, *self.environment.observation_shape]),
            action=tf.zeros([*shape, *action.shape], action.dtype),
            **others,
        )
        return Memory(vector.first(self.environment, run_seed(self.seed), self._index(replica)), experience)

    def with_episodes_cut_off(self, memory: Memory) -> Memory:
        """Returns `memory`: advantages do not depend on earlier rollouts."""
        return memory

    def gather(
        self, params: Tensors, state: Tensors, memory: Memory, step: tf.Tensor, replica: tf.Tensor
    ) -> tuple[Tensors, Memory]:
        """Gathers a rollout, with the statistics of the observations of all earlier rollouts."""
        options, state = self.options, self.prepare(state)
        assert isinstance(self.environment, Environment)
        assert isinstance(memory.vector, Vector)
        end, experience = roll_out(
            self.environment,
            self._apply(params, state),
            memory.vector,
            steps=options.rollout_steps,
            seed=run_seed(self.seed),
            index=self._index(replica),
            time=self._round(step) * options.rollout_steps,
            discount=options.discount,
            gae_lambda=options.gae_lambda,
            reward_scale=options.reward_scale,
        )
        return state, Memory(end, experience)

    def _apply(self, params: Tensors, state: Tensors) -> Callable[[tf.Tensor], Sequence[tf.Tensor]]:
        return lambda x: call_model(self.model, params, state, x, training=False).outputs

    def prepare(self, state: Tensors) -> Tensors:
        """Adds the contribution of the last rollout to the statistics."""
        return self.statistics.taken_over(state, self.options.transitions_per_rollout)

    def choose(
        self, params: Tensors, state: Tensors, observation: tf.Tensor, *, index: tf.Tensor, time: tf.Tensor, step: Any
    ) -> Choice:
        """Draws actions from the policy."""
        del step
        return draw(self._apply(params, state)(observation), run_seed(self.seed), index, time)

    def remember(self, params: Tensors, state: Tensors, memory: Memory, taken: Step, step: Any) -> Memory:
        """Returns the rollout with advantages from the values of `params`, which are newer than the acting weights."""
        del step
        apply = self._apply(params, state)
        observation, following = (tf.cast(part, tf.float32) for part in (taken.observation, taken.following))
        taken = taken._replace(observation=observation, following=following, value=values_of(apply, observation))
        judged = judge(apply, taken, discount=self.options.discount, gae_lambda=self.options.gae_lambda)
        return memory._replace(experience=judged)

    def _round(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the number of the rollout that a step learns from, int32 scalar."""
        return tf.cast(step // self.options.steps_per_rollout, tf.int32)

    def batch(self, memory: Memory, step: tf.Tensor, replica: tf.Tensor) -> Batch:
        """Returns the minibatch of a step."""
        options, seed = self.options, run_seed(self.seed)
        place = tf.cast(step % self.options.steps_per_rollout, tf.int32)
        epoch, part = place // options.minibatches, place % options.minibatches
        drawn = {"seed": seed, "time": self._round(step) * options.rollout_epochs + epoch}
        steps, size = options.rollout_steps, options.rollout_steps // options.minibatches
        times = tf.range(steps)
        order = tf.argsort(noise.uniforms(1, stream=noise.ORDER, index=times, **drawn)[0])
        order = tf.gather(order, part * size + tf.range(size))
        rotation = noise.uniforms(1, stream=noise.ROTATION, index=self._index(replica), **drawn)[0]
        rotation = tf.cast(rotation * float(steps), tf.int32)
        chosen = (order[:, tf.newaxis] + rotation) % steps * self._own + tf.range(self._own)
        rows = [self.accumulate_steps, size * self._own // self.accumulate_steps]

        def gathered(values: tf.Tensor) -> tf.Tensor:
            flat = tf.reshape(values, [steps * self._own, *values.shape[2:]])
            return tf.reshape(tf.gather(flat, tf.reshape(chosen, [-1])), [*rows, *values.shape[2:]])

        experience = tf.nest.map_structure(gathered, memory.experience)
        share = tf.fill(rows, tf.where(epoch > 0, 0.0, 1.0 / (steps * self._own)))
        targets = Targets(experience._replace(observation=tf.zeros(rows)), share)
        return experience.observation, targets, tf.ones(rows)

    def scales(self, batch: Batch, total: Callable[[tf.Tensor], tf.Tensor]) -> Scales:
        """Returns the moments over the minibatch of all replicas."""
        _, targets, weight = batch
        past = targets.experience
        return Scales.of(past.advantage, past.target, past.target - past.value, weight, total)

    @property
    def noted_fields(self) -> Sequence[str]:
        """Empty: a minibatch does not change the rollout."""
        return ()

    def noted(
        self, params: Tensors, state: Tensors, memory: Memory, batch: Batch, step: tf.Tensor, replica: tf.Tensor
    ) -> Tensors:
        """Returns nothing, see `noted_fields`."""
        del params, state, memory, batch, step, replica
        return []


def clipped_surrogate(options: ReinforcementConfig, change: tf.Tensor, advantage: tf.Tensor) -> tf.Tensor:
    """Returns the clipped surrogate that PPO maximises, `[m]` (Schulman et al. 2017, equation 7).

    Args:
      options: Only `clip_ratio` is used.
      change: `[m]`: change of the actions' log-probabilities since they were chosen.
      advantage: `[m]`.
    """
    ratio = tf.exp(change)
    within = tf.clip_by_value(ratio, 1.0 - options.clip_ratio, 1.0 + options.clip_ratio)
    return tf.minimum(ratio * advantage, within * advantage)


def policy_gradient(_: ReinforcementConfig, change: tf.Tensor, advantage: tf.Tensor) -> tf.Tensor:
    """Returns the objective that A2C maximises, `[m]`: log-probability times advantage.

    A2C is the synchronous form of A3C (Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning). The
    arguments are those of `clipped_surrogate`.
    """
    return change * advantage


SURROGATES = {"ppo": clipped_surrogate, "a2c": policy_gradient}


class PPOObjective:
    """The surrogate, the value loss and the entropy bonus (Schulman et al. 2017, equation 9).

    Advantages are normalised over the minibatch of all replicas, see `PPO.scales`.

    Args:
      model: The policy.
      options: The coefficients.
      statistics: The statistics of the model's observations.
      also_reported: Returns further figures to report.
    """

    def __init__(
        self,
        model: keras.Model,
        options: ReinforcementConfig,
        statistics: Statistics,
        also_reported: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._model, self._options, self._statistics = model, options, statistics
        self.totals = totals_of(_SUMS, lambda sums: {**_results(sums), **also_reported()})

    def __call__(
        self, params: Tensors, state: Tensors, batch: Batch, *, training: bool, scales: Scales | None = None
    ) -> ObjectiveSums:
        """See `Objective`; `scales` is the result of `Algorithm.scales`."""
        x, targets, weight = batch
        options, past = self._options, targets.experience
        scales = scales or Scales.unknown()
        outputs, new_state, _ = call_model(self._model, params, state, x, training=training)
        policy = Distribution.of(outputs)
        advantage = (past.advantage - scales.advantage) * scales.factor
        change = policy.log_prob(past.action) - past.log_prob
        ratio, entropy = tf.exp(change), policy.entropy()
        surrogate = SURROGATES[options.algorithm](options, change, advantage)
        error = value_of(outputs) - past.target
        loss = options.value_coef * 0.5 * error * error - surrogate - options.entropy_coef * entropy
        new_state = self._statistics.collected(list(new_state), x, targets.share)
        once = tf.cast(targets.share > 0.0, tf.float32) * weight
        target, missed = past.target - scales.target, past.target - past.value - scales.missed
        sums = NamedSums(
            {
                "kl": weight * (ratio - 1.0 - change),  # Schulman 2020, Approximating KL Divergence: k3
                "entropy": weight * entropy,
                "clipped": weight * tf.cast(tf.abs(ratio - 1.0) > options.clip_ratio, tf.float32),
                "policy_loss": -weight * surrogate,
                "value_loss": weight * 0.5 * error * error,
                "count": weight,
                "target_square": once * target * target,
                "missed_square": once * missed * missed,
                "episodes": once * past.ended,
                "return": once * past.episode_return,
                "length": once * past.episode_length,
            }
        )
        return ObjectiveSums(tf.reduce_sum(weight * loss), tf.reduce_sum(weight), new_state, sums.in_order(_SUMS))


_MEANS = ("kl", "entropy", "clipped", "policy_loss", "value_loss")
_SUMS = (
    *_MEANS,
    *("count", "target_square", "missed_square", "episodes", "return", "length"),
)


def _results(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the reported figures from sums over steps: returns and lengths only if episodes ended in these steps."""
    found: dict[str, float] = {}
    if sums["episodes"]:
        found = {name: sums[name] / sums["episodes"] for name in ("return", "length")}
    found |= {name: sums[name] / max(sums["count"], 1.0) for name in _MEANS}
    if sums["target_square"] > 0.0:
        found["explained_variance"] = 1.0 - sums["missed_square"] / sums["target_square"]
    return found

"""Rollouts: the experience of a policy in T steps of many environments, and the advantages of its actions.

Shapes: T steps of a rollout, n environments of this replica, N of all replicas, a numbers per action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfpar.rl import vector
from tfpar.rl.environments import Environment
from tfpar.rl.policy import Distribution, value_of
from tfpar.rl.vector import Vector

import tensorflow as tf

# `(observations [m, ...]) -> outputs` of the policy, see `policy.build_policy`.
Apply = Callable[[tf.Tensor], Sequence[tf.Tensor]]


class Experience(NamedTuple):
    """Transitions `[T, n]`, in the order of time.

    Attributes:
      observation: Float32 `[T, n, ...]`: the observation before the action.
      action: Int32 `[T, n]` or float32 `[T, n, a]`.
      log_prob: Log-probability of the action when it was chosen.
      value: The estimated value of the observation at that time.
      advantage: The advantage of the action over that estimate.
      target: The target for the value.
      ended: Float32: 1 where an episode ended, otherwise 0.
      episode_return: The episode's return where it ended, otherwise 0.
      episode_length: The episode's length where it ended, otherwise 0.
    """

    observation: tf.Tensor
    action: tf.Tensor
    log_prob: tf.Tensor
    value: tf.Tensor
    advantage: tf.Tensor
    target: tf.Tensor
    ended: tf.Tensor
    episode_return: tf.Tensor
    episode_length: tf.Tensor


class Choice(NamedTuple):
    """The actions that a policy chose.

    Attributes:
      action: Int32 `[n]` or float32 `[n, a]`.
      log_prob: Log-probability of the action, float32 `[n]`; 0 if not needed.
      value: Value of the observation, float32 `[n]`; 0 if not needed.
    """

    action: tf.Tensor
    log_prob: tf.Tensor
    value: tf.Tensor


class Step(NamedTuple):
    """The results of one step of the environments: fields of `Experience`, and values to compute the others from.

    `following` is the observation after the action, before any new episode; `terminated` is 1 where the episode
    terminated.
    """

    observation: tf.Tensor
    action: tf.Tensor
    log_prob: tf.Tensor
    value: tf.Tensor
    reward: tf.Tensor
    terminated: tf.Tensor
    ended: tf.Tensor
    following: tf.Tensor
    episode_return: tf.Tensor
    episode_length: tf.Tensor


def roll_out(
    environment: Environment,
    apply: Apply,
    start: Vector,
    *,
    steps: int,
    seed: tf.Tensor,
    index: tf.Tensor,
    time: tf.Tensor,
    discount: float,
    gae_lambda: float,
    reward_scale: float = 1.0,
) -> tuple[Vector, Experience]:
    """Acts for T steps in every environment and computes the advantages of the actions.

    Advantages are those of generalised advantage estimation (Schulman et al. 2016, equation 16). The value of the state
    after a step counts unless the episode terminated; a time limit is not a termination (Pardo et al. 2018, Time Limits
    in Reinforcement Learning).

    Args:
      environment: The environment.
      apply: The policy; nothing is differentiated.
      start: The states of the n environments.
      steps: Number of steps, T.
      seed: Int32 `[2]`: seed of the run.
      index: Int32 `[n]`: indices of the environments among those of all replicas.
      time: Int32 scalar: the number of the first step.
      discount: Discount of a reward one step later.
      gae_lambda: Decay of the estimation, lambda.
      reward_scale: Factor on rewards.

    Returns:
      The states of the environments afterwards, and the experience.
    """

    def choose(observation: tf.Tensor, number: tf.Tensor) -> Choice:
        return draw(apply(observation), seed, index, number)

    end, record = act_for(
        environment, choose, start, steps=steps, seed=seed, index=index, time=time, reward_scale=reward_scale
    )
    return end, judge(apply, record, discount=discount, gae_lambda=gae_lambda)


def draw(outputs: Sequence[tf.Tensor], seed: tf.Tensor, index: tf.Tensor, time: tf.Tensor) -> Choice:
    """Draws actions from a policy's outputs for n observations; the other arguments are those of `roll_out`."""
    policy = Distribution.of(outputs)
    action = policy.sample(seed, index, time)
    return Choice(action, policy.log_prob(action), value_of(outputs))


def values_of(apply: Apply, observation: tf.Tensor) -> tf.Tensor:
    """Returns the values of observations `[T, n, ...]`, float32 `[T, n]`; `apply` is that of `roll_out`."""
    flat = tf.reshape(observation, [-1, *observation.shape[2:]])
    return tf.reshape(value_of(apply(flat)), tf.shape(observation)[:2])


def judge(apply: Apply, record: Step, *, discount: float, gae_lambda: float) -> Experience:
    """Returns the transitions of a rollout with their advantages; the arguments are those of `roll_out`."""
    after = values_of(apply, record.following)
    delta = record.reward + discount * after * (1.0 - record.terminated) - record.value
    decay = discount * gae_lambda * (1.0 - record.ended)
    advantage = tf.scan(
        lambda later, now: now[0] + now[1] * later, (delta, decay), tf.zeros_like(delta[0]), reverse=True
    )
    return Experience(
        record.observation,
        record.action,
        record.log_prob,
        record.value,
        advantage,
        advantage + record.value,
        record.ended,
        record.episode_return,
        record.episode_length,
    )


def act_for(
    environment: Environment,
    choose: Callable[[tf.Tensor, tf.Tensor], Choice],
    start: Vector,
    *,
    steps: int,
    seed: tf.Tensor,
    index: tf.Tensor,
    time: tf.Tensor,
    reward_scale: float,
) -> tuple[Vector, Step]:
    """Acts for T steps in every environment.

    Args:
      environment: The environment.
      choose: `(observations [n, ...], number of the step) -> Choice`.
      start: As for `roll_out`.
      steps: As for `roll_out`.
      seed: As for `roll_out`.
      index: As for `roll_out`.
      time: As for `roll_out`.
      reward_scale: As for `roll_out`.

    Returns:
      The states of the environments afterwards, and the results of each step, stacked along a new first axis.
    """

    def act(current: Vector, number: tf.Tensor) -> tuple[Vector, Step]:
        observation = environment.observe(current.state)
        choice = choose(observation, number)
        outcome = vector.step(environment, current, choice.action, seed, index, number)
        return outcome.vector, Step(
            observation,
            *choice,
            reward_scale * outcome.reward,
            tf.cast(outcome.terminated, tf.float32),
            tf.cast(outcome.terminated | outcome.truncated, tf.float32),
            outcome.observation,
            outcome.episode_return,
            outcome.episode_length,
        )

    return _repeated(environment, act, start, steps, time)


def _repeated(
    environment: Environment,
    act: Callable[[Vector, tf.Tensor], tuple[Vector, Step]],
    start: Vector,
    steps: int,
    time: tf.Tensor,
) -> tuple[Vector, Step]:
    """Returns the environments after T steps, and the results of each step, stacked along a new first axis."""
    shape = start.steps.shape

    def array(*dims: int, dtype: tf.DType = tf.float32) -> tf.TensorArray:
        return tf.TensorArray(dtype, size=steps, element_shape=[*shape, *dims])

    observations = {name: array(*environment.observation_shape) for name in ("observation", "following")}
    spec = environment.actions.spec
    action = array(*spec.shape, dtype=spec.dtype)
    others = {name: array() for name in Step._fields if name not in (*observations, "action")}

    def body(place: tf.Tensor, current: Vector, arrays: Step) -> tuple[tf.Tensor, Vector, Step]:
        current, step = act(current, time + place)
        return place + 1, current, Step(*(to.write(place, part) for to, part in zip(arrays, step, strict=True)))

    _, end, arrays = tf.while_loop(
        lambda place, *_: place < steps,
        body,
        (tf.constant(0), start, Step(action=action, **observations, **others)),
        parallel_iterations=1,
        maximum_iterations=steps,
    )
    return end, Step(*(each.stack() for each in arrays))

"""A vector of environments: time limits, new episodes, and the returns of ended episodes.

Shapes: n environments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tfpar.rl import noise
from tfpar.rl.environments import AnyEnvironment, Environment, State

import tensorflow as tf


class Vector(NamedTuple):
    """The states of n environments in their current episodes.

    Attributes:
      state: The states of the dynamics.
      steps: Int32 `[n]`: steps of the current episode so far.
      reward: Float32 `[n]`: sum of the current episode's rewards so far.
    """

    state: State
    steps: tf.Tensor
    reward: tf.Tensor


class Outcome(NamedTuple):
    """The result of one step of n environments.

    Attributes:
      vector: Their states after the step; environments whose episode has ended are at the start of a new one.
      observation: Float32 `[n, ...]`: the observation after the action, before any new episode.
      reward: Float32 `[n]`.
      terminated: Bool `[n]`: whether the episode terminated.
      truncated: Bool `[n]`: whether only the time limit cut it off.
      episode_return: Float32 `[n]`: sum of the rewards of an episode that has ended, else 0.
      episode_length: Float32 `[n]`: number of steps of an episode that has ended, else 0.
    """

    vector: Vector
    observation: tf.Tensor
    reward: tf.Tensor
    terminated: tf.Tensor
    truncated: tf.Tensor
    episode_return: tf.Tensor
    episode_length: tf.Tensor


def reset(environment: Environment, seed: tf.Tensor, index: tf.Tensor) -> Vector:
    """Returns n environments at the start of an episode.

    Args:
      environment: The environment.
      seed: Int32 `[2]`: seed of the run.
      index: Int32 `[n]`: their indices among those of all replicas.
    """
    return _fresh(environment, seed, index, tf.constant(-1))


def first(environment: AnyEnvironment, seed: tf.Tensor, index: tf.Tensor) -> Vector | tuple[()]:
    """Returns the result of `reset`; `()` for environments on the host, whose states are outside TensorFlow."""
    return reset(environment, seed, index) if isinstance(environment, Environment) else ()


def step(
    environment: Environment, vector: Vector, action: tf.Tensor, seed: tf.Tensor, index: Any, time: Any
) -> Outcome:
    """Steps every environment.

    Args:
      environment: The environment.
      vector: The states of n environments.
      action: Int32 `[n]`, or float32 `[n, size]`.
      seed: Int32 `[2]`: seed of the run.
      index: Int32 `[n]`: their indices among those of all replicas.
      time: Int32 scalar: the number of this step, from 0; the same for all environments.
    """
    drawn = noise.uniforms(environment.step_numbers, seed=seed, stream=noise.STEP, index=index, time=time)
    moved = environment.step(vector.state, action, drawn)
    reward = tf.cast(moved.reward, tf.float32)
    steps, total = vector.steps + 1, vector.reward + reward
    truncated = (steps >= environment.max_steps) & ~moved.terminated
    done = moved.terminated | truncated
    ended = tf.cast(done, tf.float32)
    fresh = _fresh(environment, seed, index, time)
    return Outcome(
        tf.nest.map_structure(lambda new, old: _where(done, new, old), fresh, Vector(moved.state, steps, total)),
        environment.observe(moved.state),
        reward,
        moved.terminated,
        truncated,
        ended * total,
        ended * tf.cast(steps, tf.float32),
    )


def _fresh(environment: Environment, seed: tf.Tensor, index: tf.Tensor, time: tf.Tensor) -> Vector:
    numbers = noise.uniforms(environment.reset_numbers, seed=seed, stream=noise.RESET, index=index, time=time)
    state = environment.reset(numbers)
    return Vector(state, tf.zeros_like(index), tf.zeros(tf.shape(index)))


def _where(condition: tf.Tensor, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    shape = tf.concat([tf.shape(condition), tf.ones([tf.rank(one) - 1], tf.int32)], axis=0)
    return tf.where(tf.reshape(condition, shape) if one.shape.rank != 1 else condition, one, other)

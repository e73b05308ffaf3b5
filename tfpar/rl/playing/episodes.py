"""Plays a saved policy in Gymnasium or EnvPool, which share no code with the environments on the device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfpar.config import ConfigError
from tfpar.rl.environments import Discrete, HostEnvironment, find_on_host

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

_SIDE_BY_SIDE = 64
LONGEST = 10_000  # steps after which an episode is cut off in an environment without a time limit


class Played(NamedTuple):
    """The results of episodes.

    Attributes:
      returns: Float64 `[episodes]`: sum of the rewards of each episode.
      lengths: Int64 `[episodes]`: number of steps of each episode.
    """

    returns: np.ndarray
    lengths: np.ndarray

    def summary(self, env: str) -> dict[str, Any]:
        """Returns `env`, `episodes`, the means `return` and `length`, and the spread of the returns."""
        return {
            "env": env,
            "episodes": len(self.returns),
            "return": float(np.mean(self.returns)),
            "return_std": float(np.std(self.returns)),
            "return_min": float(np.min(self.returns)),
            "return_max": float(np.max(self.returns)),
            "length": float(np.mean(self.lengths)),
        }


def play(model: keras.Model, name: str, *, episodes: int = 100, seed: int = 0) -> Played:
    """Plays episodes to their end with the most likely actions.

    Args:
      model: A policy, as in `model.keras`: maps observations to outputs, of which the first are logits or means.
      name: The environment's name in Gymnasium, with or without the prefix `gym:`; or its name in EnvPool with the
        prefix `envpool:`.
      episodes: Number of episodes.
      seed: Seed of the first episode; the following ones have the seeds `seed + 1`, `seed + 2`, ...

    Raises:
      ConfigError: The package is missing or has no such environment, or the model does not fit the environment.
    """
    environment = find_on_host(name)
    call = tf.function(lambda x: model(x, training=False), autograph=False, reduce_retracing=True)
    return play_outputs(call, tuple(model.inputs[0].shape[1:]), environment, range(seed, seed + episodes))


def play_outputs(
    outputs: Callable[[tf.Tensor], Any],
    observation_shape: tuple[int, ...],
    environment: HostEnvironment,
    seeds: Sequence[int],
) -> Played:
    """Plays episodes to their end with the most likely actions; without a time limit, at most `LONGEST` steps.

    Args:
      outputs: A policy: `observations [n, ...] -> outputs`, of which the first are logits or means.
      observation_shape: Shape of the policy's observations.
      environment: The environment in which it plays.
      seeds: Seeds of the episodes.

    Raises:
      ConfigError: The environment's observations have another shape.
    """
    if environment.observation_shape != observation_shape:
        raise ConfigError(
            f"--env={environment.name}: its observations have shape {environment.observation_shape}, and the model "
            f"takes {observation_shape}. Name the environment that it was trained in."
        )
    act = _policy(outputs, environment)
    returns: list[float] = []
    lengths: list[int] = []
    while len(returns) < len(seeds):
        several = [*seeds][len(returns) : len(returns) + _SIDE_BY_SIDE]
        envs = environment.make(len(several), False)
        try:
            played, ended = _play_at_once(act, envs, several, LONGEST if environment.endless else None)
        finally:
            envs.close()
        if not ended:
            _warn_of_no_end(environment.name)
        returns.extend(played.returns)
        lengths.extend(played.lengths)
    return Played(np.asarray(returns), np.asarray(lengths))


def _policy(call: Callable[[tf.Tensor], Any], environment: HostEnvironment) -> Any:
    """Returns the function `observations [n, ...] -> actions` that chooses the most likely actions."""

    def act(observations: np.ndarray) -> np.ndarray:
        outputs = call(tf.constant(observations, tf.float32))
        first = np.asarray(outputs[0] if isinstance(outputs, list | tuple) else outputs)
        discrete = isinstance(environment.actions, Discrete)
        return environment.to_host(np.argmax(first, axis=-1) if discrete else first)

    return act


@functools.cache  # once per process
def _warn_of_no_end(name: str) -> None:
    _log.warning("--env=%s has no time limit: episodes are cut off after %d steps when they are played", name, LONGEST)


def _play_at_once(act: Any, envs: Any, seeds: list[int], longest: int | None) -> tuple[Played, bool]:
    """Plays the first episode of each environment, of `longest` steps at most; also returns whether all have ended."""
    count = len(seeds)
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)
    playing = np.ones(count, bool)
    observations, _ = envs.reset(seed=seeds)
    while playing.any() and (longest is None or lengths.max() < longest):
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        returns += rewards * playing
        lengths += playing
        playing &= ~(terminated | truncated)
    return Played(returns, lengths), not playing.any()

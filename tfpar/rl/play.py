"""Playing a saved policy in Gymnasium itself, whose code has nothing in common with the environments on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfpar.config import ConfigError

import keras
import numpy as np
import tensorflow as tf

_SIDE_BY_SIDE = 64


class Played(NamedTuple):
    """Episodes.

    Attributes:
      returns: Float64 `[episodes]`: sums of their rewards.
      lengths: Int64 `[episodes]`: their steps.
    """

    returns: np.ndarray
    lengths: np.ndarray

    def summary(self, env: str) -> dict[str, Any]:
        """The figures: `env`, `episodes`, `return` and `length`, which are means, and the spread of the returns."""
        return {
            "env": env,
            "episodes": len(self.returns),
            "return": float(np.mean(self.returns)),
            "return_std": float(np.std(self.returns)),
            "return_min": float(np.min(self.returns)),
            "return_max": float(np.max(self.returns)),
            "length": float(np.mean(self.lengths)),
        }


def require_gymnasium() -> Any:
    """The module `gymnasium`.

    Raises:
      ConfigError: It is not installed.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError("playing in Gymnasium needs its package: pip install 'tfpar[rl]'.") from error
    return gymnasium


def make_environments(name: str, count: int) -> Any:
    """Some environments of Gymnasium side by side, in this process.

    Args:
      name: As Gymnasium has it registered, e.g. `"CartPole-v1"`.
      count: How many.

    Raises:
      ConfigError: There is none of this name, or its package is missing.
    """
    gymnasium = require_gymnasium()
    try:
        return gymnasium.make_vec(name, num_envs=count, vectorization_mode="sync")
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"--env={name}: Gymnasium cannot make it: {error}") from error


def play(model: keras.Model, name: str, *, episodes: int = 100, seed: int = 0) -> Played:
    """Plays episodes to their end with the most likely actions.

    Args:
      model: A policy: observations to logits or means, its first output, as in `model.keras`.
      name: The environment's name in Gymnasium.
      episodes: How many.
      seed: The episodes begin where Gymnasium's seeds `seed`, `seed + 1`, ... begin.

    Raises:
      ConfigError: Gymnasium is missing, or has no such environment; or the model does not fit it.
    """
    returns: list[float] = []
    lengths: list[int] = []
    while len(returns) < episodes:
        count = min(_SIDE_BY_SIDE, episodes - len(returns))
        envs = make_environments(name, count)
        try:
            played = _play_at_once(_policy(model, envs), envs, count, seed + len(returns))
        finally:
            envs.close()
        returns.extend(played.returns)
        lengths.extend(played.lengths)
    return Played(np.asarray(returns), np.asarray(lengths))


def _policy(model: keras.Model, envs: Any) -> Any:
    """`observations [n, ...] -> actions` of the most likely actions."""
    observed, actions = envs.single_observation_space, envs.single_action_space
    expected = tuple(model.inputs[0].shape[1:])
    if tuple(observed.shape or ()) != expected:
        raise ConfigError(
            f"--env={envs.spec.id}: its observations have shape {tuple(observed.shape or ())}, and the model takes "
            f"{expected}. Name the environment that it was trained in."
        )
    call = tf.function(lambda x: model(x, training=False), autograph=False, reduce_retracing=True)

    def act(observations: np.ndarray) -> np.ndarray:
        outputs = call(tf.constant(observations, tf.float32))
        first = np.asarray(outputs[0] if isinstance(outputs, list | tuple) else outputs)
        if actions.shape == ():
            return np.argmax(first, axis=-1) + getattr(actions, "start", 0)
        return np.clip(first, actions.low, actions.high).astype(actions.dtype)

    return act


def _play_at_once(act: Any, envs: Any, count: int, seed: int) -> Played:
    """The first episode of each environment."""
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)
    playing = np.ones(count, bool)
    observations, _ = envs.reset(seed=seed)
    while playing.any():
        observations, rewards, terminated, truncated, _ = envs.step(act(observations))
        returns += rewards * playing
        lengths += playing
        playing &= ~(terminated | truncated)
    return Played(returns, lengths)

"""Pictures of an episode, for TensorBoard."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.rl import vector
from tfpar.rl.environments import AnyEnvironment, Environment, HostEnvironment
from tfpar.rl.policy import Distribution
from tfpar.training.model.call import call_model
from tfpar.training.program import Program
from tfpar.training.seeds import run_seed

import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

_PICTURES, _KEPT = 16, 64
_LONGEST = 2000  # the most steps of an episode that are played for its pictures


class Film:
    """Takes pictures of an episode that this process plays with the most likely actions.

    Args:
      program: The policy under the strategy.
      environment: The environment in which it acts.
      seed: Seed of the episode.
    """

    def __init__(self, program: Program, environment: AnyEnvironment, *, seed: int = 0) -> None:
        self._program, self._environment, self._seed = program, environment, seed
        self._act = tf.function(self._chosen, autograph=False)
        self._step = tf.function(self._stepped, autograph=False)
        self._impossible = isinstance(environment, Environment) and environment.render is None

    def __call__(self) -> tuple[np.ndarray, list[str]] | None:
        """Plays an episode; returns pictures of it at even intervals, with captions.

        Returns:
          Pictures uint8 `[k, height, width, 3]` and their captions; None if the environment cannot be drawn.
        """
        if self._impossible:
            return None
        try:
            host = isinstance(self._environment, HostEnvironment)
            frames, rewards = self._on_host() if host else self._on_device()
        except ConfigError as error:
            self._impossible = True
            _log.warning("TensorBoard shows no episode: %s", error)
            return None
        steps = sorted(frames)
        chosen = np.linspace(0, len(steps) - 1, min(_PICTURES, len(steps))).round().astype(int).tolist()
        places = [steps[index] for index in sorted(set(chosen))]
        totals = np.concatenate([[0.0], np.cumsum(rewards)])
        return np.stack([frames[place]() for place in places]), [f"{place}: {totals[place]:g}" for place in places]

    def _weights(self) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]:
        program = self._program
        return program.first_copies(program.eval_weights()), program.first_copies(program.model.non_trainable_variables)

    def _chosen(self, params: Any, state: Any, observation: tf.Tensor) -> tf.Tensor:
        return Distribution.of(
            call_model(self._program.model, params, state, observation, training=False).outputs
        ).mode()

    def _stepped(self, params: Any, state: Any, current: vector.Vector, time: tf.Tensor) -> vector.Outcome:
        environment = self._environment
        assert isinstance(environment, Environment)
        action = self._chosen(params, state, environment.observe(current.state))
        return vector.step(environment, current, action, run_seed(self._seed), tf.range(1), time)

    def _on_device(self) -> tuple[dict[int, Callable[[], np.ndarray]], list[float]]:
        """Returns functions that draw the pictures, by the steps before them, and the reward of each step."""
        environment = self._environment
        assert isinstance(environment, Environment)
        params, state = self._weights()
        current = vector.reset(environment, run_seed(self._seed), tf.range(1))
        observed, rewards = [environment.observe(current.state).numpy()[0]], []
        for time in range(environment.max_steps):
            outcome = self._step(params, state, current, tf.constant(time))
            observed.append(outcome.observation.numpy()[0])
            rewards.append(float(outcome.reward[0]))
            current = outcome.vector
            if outcome.terminated[0] or outcome.truncated[0]:
                break
        draw = environment.render
        assert draw is not None
        return {place: functools.partial(draw, each) for place, each in enumerate(observed)}, rewards

    def _on_host(self) -> tuple[dict[int, Callable[[], np.ndarray]], list[float]]:
        environment = self._environment
        assert isinstance(environment, HostEnvironment)
        params, state = self._weights()
        try:
            envs = environment.make_shown()
        except TypeError as error:  # Gymnasium's if the environment takes no `render_mode`
            raise ConfigError(f"--env={environment.name} cannot be rendered: {error}") from error
        frames: dict[int, np.ndarray] = {}
        rewards: list[float] = []
        every = 1  # steps between two pictures; grows with the episode, whose pictures would fill the memory
        try:
            observation, _ = envs.reset(seed=[self._seed])
            for place in range(_LONGEST):
                if place % every == 0:
                    frames[place] = _rendered(envs, environment.name)
                if len(frames) > _KEPT:
                    every *= 2
                    frames = {each: frame for each, frame in frames.items() if each % every == 0}
                action = self._act(params, state, tf.constant(observation, tf.float32)).numpy()
                observation, reward, terminated, truncated, _ = envs.step(environment.to_host(action))
                rewards.append(float(reward[0]))
                if terminated[0] or truncated[0]:
                    break
        finally:
            envs.close()
        return {place: functools.partial(np.asarray, frame) for place, frame in frames.items()}, rewards


def _rendered(envs: Any, name: str) -> np.ndarray:
    """Returns a picture of the single environment.

    Raises:
      ConfigError: It cannot be rendered.
    """
    try:
        picture = envs.render()[0]
    except Exception as error:  # a missing package, or any exception of the environment
        raise ConfigError(f"--env={name} cannot be rendered: {type(error).__name__}: {error}") from error
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        raise ConfigError(f"--env={name} cannot be rendered: `render` returns {type(picture).__name__}")
    return picture.astype(np.uint8)

"""Environments of EnvPool, which runs many environments in C++ threads: `--env=envpool:NAME`.

EnvPool (Weng et al. 2022, arXiv:2206.10558) has its own names for Atari, classic control, Box2D, MuJoCo and others, and
returns the first observation of a new episode one step after the end of the previous episode. `Pool` adapts it to the
interface of Gymnasium's vector environments, which `tfpar.rl.actors` uses.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.rl.environments.host import HostEnvironment, describe, no_such_environment

import numpy as np

PREFIX = "envpool:"
_LARGEST_STACK = 16  # most frames in the first dim of a stack of frames, such as Atari's [frames, height, width]


class Pool:
    """A vector of EnvPool environments. When an episode ends, a new one begins in the same step.

    Args:
      name: The name in EnvPool's registry.
      count: Number of environments, n.
      threads: Number of threads; 0 lets EnvPool choose.

    Attributes:
      single_observation_space: The observations of one environment; pictures have their channels last.
      single_action_space: The actions of one environment.
      reward_threshold: Mean return that counts as solved; None if EnvPool states none.

    Raises:
      ConfigError: EnvPool is missing, or has no such environment.
    """

    def __init__(self, name: str, count: int, threads: int = 0) -> None:
        self._name, self._count, self._threads = name, count, threads
        self._envs = self._made(range(count))
        with _without_warnings():
            space, self.single_action_space = self._envs.observation_space, self._envs.action_space
        shape = getattr(space, "shape", None)
        if shape is None or not hasattr(space, "low"):
            raise ConfigError(f"--env={PREFIX}{name}: its observations are {space}, and a policy takes a single array.")
        self._channels_first = space.dtype == np.uint8 and len(shape) == 3 and shape[0] <= _LARGEST_STACK < shape[-1]
        if self._channels_first:
            space = type(space)(0, 255, (*shape[1:], shape[0]), np.uint8)
        self.single_observation_space = space
        self.reward_threshold: float | None = self._envs.spec.reward_threshold
        self._last: np.ndarray | None = None

    def reset(self, *, seed: Sequence[int]) -> tuple[np.ndarray, dict[str, Any]]:
        """Creates the environments again, each with its own seed; returns their first observations `[n, ...]`."""
        self._envs = self._made(seed)
        observation, info = self._envs.reset()
        self._last = self._observed(observation)
        return self._last, info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Steps every environment; returns observations, rewards, `terminated`, `truncated` and `{"final_obs": ...}`.

        Every array is `[n, ...]`. If an episode ended, the observation is the first one of the next episode, and
        `final_obs` has the last one of the ended episode.
        """
        integers = np.issubdtype(self.single_action_space.dtype, np.integer)
        taken = action.astype(np.int32 if integers else self.single_action_space.dtype)
        observation, reward, terminated, truncated, _ = self._envs.step(taken)
        final = observation = self._observed(observation)
        done = np.flatnonzero(terminated | truncated)
        if len(done):
            observation = observation.copy()
            observation[done] = self._observed(self._envs.reset(done)[0])
        self._last = observation
        return observation, reward, terminated, truncated, {"final_obs": final}

    def render(self) -> np.ndarray:
        """The newest frame of each observation, `[n, height, width, 1]`.

        Raises:
          NotImplementedError: Observations are not pictures, and EnvPool does not draw any.
        """
        if self._last is None or self._last.dtype != np.uint8 or self._last.ndim != 4:
            raise NotImplementedError("EnvPool draws no pictures, and the observations are not pictures")
        return self._last[..., -1:]

    def close(self) -> None:
        """Ends the threads."""
        self._envs.close()

    def _made(self, seeds: Sequence[int]) -> Any:
        envpool = require_envpool()
        seeds = [int(seed) & 0x7FFFFFFF for seed in seeds]  # EnvPool takes 31 bits
        with _without_warnings():
            try:
                return envpool.make(
                    self._name, env_type="gymnasium", num_envs=self._count, num_threads=self._threads, seed=seeds
                )
            except (AssertionError, ValueError, TypeError) as error:
                names = envpool.list_all_envs()
                reason = str(error) or type(error).__name__
                if self._name not in names:
                    reason = no_such_environment(self._name, names, "envpool.list_all_envs()")
                raise ConfigError(f"--env={PREFIX}{self._name}: EnvPool cannot create it: {reason}") from error

    def _observed(self, observation: np.ndarray) -> np.ndarray:
        return np.moveaxis(observation, 1, -1) if self._channels_first else observation


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppresses warnings: Gymnasium warns of every space whose bounds it rounds to float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def require_envpool() -> Any:
    """Returns the module `envpool`.

    Raises:
      ConfigError: It is not installed, or cannot be loaded.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # EnvPool 1.1 prints that Gym is unmaintained
            import envpool
    except ImportError as error:
        raise ConfigError(
            f"EnvPool's environments need its package: pip install 'tfpar[envpool]' ({error})."
        ) from error
    return envpool


def make_pool(name: str, count: int, processes: bool = False) -> Pool:
    """Creates a vector of EnvPool environments.

    Args:
      name: The name in EnvPool's registry, e.g. `"Pong-v5"`.
      count: Number of environments.
      processes: Ignored: EnvPool has its own threads. `tfpar.rl.options.check_host` rejects the option.

    Raises:
      ConfigError: EnvPool has no environment of this name, or is missing.
    """
    del processes
    return Pool(name, count)


def find_in_envpool(name: str) -> HostEnvironment:
    """Returns the EnvPool environment with this name.

    Raises:
      ConfigError: There is none, or tfpar's policies do not support its action space.
    """
    envs = make_pool(name, 1)
    try:
        make = functools.partial(make_pool, name)
        return describe(f"{PREFIX}{name}", envs, envs.reward_threshold, make, lambda: make(1))
    finally:
        envs.close()

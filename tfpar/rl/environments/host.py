"""Environments that run on the host: those of Gymnasium, as `--env=gym:NAME`. The module `pool` has those of EnvPool.

Threads of this process act in them while the device learns; see `tfpar.rl.actors`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from tfpar.config import ConfigError
from tfpar.process.suggestions import did_you_mean
from tfpar.rl.environments.protocol import Actions, Continuous, Discrete

import numpy as np

PREFIX = "gym:"


@dataclasses.dataclass(frozen=True, eq=False)
class HostEnvironment:
    """An environment of Gymnasium or EnvPool.

    Attributes:
      name: The name for `--env`, with the prefix `gym:` or `envpool:`.
      observation_shape: Shape of one observation.
      actions: The action space.
      goal: Mean return of an evaluation at which `--stop_at_goal` ends a run; None if there is no such return.
      observation_scale: The factor by which a policy multiplies observations: 1/255 for pixels, otherwise 1.
      make: `(count, processes) -> gymnasium.vector.VectorEnv` with `count` environments, each in its own process or all
        in this one. When an episode ends, a new one begins in the same step.
      make_shown: `() -> gymnasium.vector.VectorEnv` with one environment, which `render()` draws.
      to_host: Converts a policy's actions to those of the environment: int32 `[n]`, or float32 `[n, size]`, clipped to
        the bounds.
      observation_dtype: The dtype in which observations are kept: `uint8` for pixels, otherwise `float32`.
      endless: Whether it has no time limit, so that an episode may never end.
    """

    name: str
    observation_shape: tuple[int, ...]
    actions: Actions
    goal: float | None
    observation_scale: float
    make: Callable[[int, bool], Any]
    make_shown: Callable[[], Any]
    to_host: Callable[[np.ndarray], np.ndarray]
    observation_dtype: str = "float32"
    endless: bool = False


def require_gymnasium() -> Any:
    """Returns the module `gymnasium`.

    Raises:
      ConfigError: It is not installed.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError("Gymnasium's environments need its package: pip install 'tfpar[rl]'.") from error
    return gymnasium


def no_such_environment(name: str, known: Iterable[str], where: str) -> str:
    """Returns the reason for an environment that does not exist, and what a user may do.

    Args:
      name: The name that was given.
      known: The names that exist.
      where: What lists them in Python.
    """
    return (
        f"there is no such environment.{did_you_mean(name, known, most=2, cutoff=0.6)} `{where}` has the names of all."
    )


def make_environments(name: str, count: int, processes: bool = False, *, render: bool = False) -> Any:
    """Creates a vector of Gymnasium environments. Observations that are not arrays are flattened to one array.

    Args:
      name: The name in Gymnasium's registry, e.g. `"CartPole-v1"`.
      count: Number of environments.
      processes: Whether each environment has its own process.
      render: Whether `render()` returns pictures of them.

    Raises:
      ConfigError: There is no environment of this name, or its package is missing.
    """
    gymnasium = require_gymnasium()
    from gymnasium.vector import AutoresetMode

    def flatten(env: Any) -> Any:
        # A Box of a single number becomes one of shape [1], which a layer can read.
        plain = isinstance(env.observation_space, gymnasium.spaces.Box) and env.observation_space.shape
        return env if plain else gymnasium.wrappers.FlattenObservation(env)

    try:
        return gymnasium.make_vec(
            name,
            num_envs=count,
            vectorization_mode="async" if processes else "sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
            wrappers=[flatten],
            **({"render_mode": "rgb_array"} if render else {}),
        )
    except (gymnasium.error.Error, ImportError, NotImplementedError) as error:
        reason = str(error)
        if isinstance(error, gymnasium.error.NameNotFound | gymnasium.error.VersionNotFound):
            # Its own suggestions lack the version.
            reason = no_such_environment(name, gymnasium.registry, "gymnasium.registry")
        raise ConfigError(f"--env={PREFIX}{name}: Gymnasium cannot create it: {reason}") from error


def find_in_gymnasium(name: str) -> HostEnvironment:
    """Returns the Gymnasium environment with this name.

    Raises:
      ConfigError: There is none, or tfpar's policies do not support its observation space or its action space.
    """
    envs = make_environments(name, 1)
    try:
        goal = envs.spec.reward_threshold if envs.spec else None
        make = functools.partial(make_environments, name)
        described = describe(f"{PREFIX}{name}", envs, goal, make, lambda: make(1, render=True))
        return dataclasses.replace(described, endless=not (envs.spec and envs.spec.max_episode_steps))
    finally:
        envs.close()


def describe(
    name: str, envs: Any, goal: float | None, make: Callable[[int, bool], Any], make_shown: Callable[[], Any]
) -> HostEnvironment:
    """Describes an environment to the policies.

    Args:
      name: The name for `--env`.
      envs: A vector of such environments.
      goal: As in `HostEnvironment`.
      make: As in `HostEnvironment`.
      make_shown: As in `HostEnvironment`.

    Raises:
      ConfigError: tfpar's policies do not support its observation space or its action space.
    """
    observed, action = envs.single_observation_space, envs.single_action_space
    if not observed.shape:  # even flattened, e.g. Sequence and Graph
        raise ConfigError(
            f"--env={name}: its observation space {observed} is not supported; observations must be arrays of one "
            "shape, or be made of such (Dict, Tuple). Wrap the environment, and register the result with Gymnasium."
        )
    return HostEnvironment(
        name=name,
        observation_shape=tuple(observed.shape),
        actions=_actions(name, action),
        goal=None if goal is None else float(goal),
        observation_scale=1.0 / 255.0 if observed.dtype == np.uint8 else 1.0,
        make=make,
        make_shown=make_shown,
        to_host=functools.partial(to_host, action),
        observation_dtype="uint8" if observed.dtype == np.uint8 else "float32",
    )


def to_host(space: Any, action: np.ndarray) -> np.ndarray:
    """Converts a policy's actions to those of a Gymnasium action space."""
    if not hasattr(space, "low"):  # Discrete; a Box may have no dims either
        return np.asarray(action + getattr(space, "start", 0))
    return np.clip(action.reshape([-1, *space.shape]), space.low, space.high).astype(space.dtype)


def _actions(name: str, space: Any) -> Actions:
    kind = type(space).__name__
    if kind == "Discrete":
        return Discrete(int(space.n))
    if kind == "Box":
        return Continuous(*(tuple(float(number) for number in part.ravel()) for part in (space.low, space.high)))
    raise ConfigError(
        f"--env={name}: its action space {space} is not supported; it must be Discrete or Box. Wrap the "
        "environment, and register the result with Gymnasium."
    )

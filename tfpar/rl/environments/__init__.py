"""Environments by name: those that run on the device and, with a prefix, those of Gymnasium and EnvPool."""

from __future__ import annotations

from tfpar.config import ConfigError, unknown_name
from tfpar.rl.environments.acrobot import ACROBOT
from tfpar.rl.environments.cartpole import CARTPOLE
from tfpar.rl.environments.catch import CATCH
from tfpar.rl.environments.host import PREFIX, HostEnvironment, find_in_gymnasium
from tfpar.rl.environments.mountain_car import MOUNTAIN_CAR
from tfpar.rl.environments.pendulum import PENDULUM
from tfpar.rl.environments.pool import PREFIX as POOL_PREFIX
from tfpar.rl.environments.pool import find_in_envpool
from tfpar.rl.environments.protocol import Actions, Continuous, Discrete, Environment, State, Transition

AnyEnvironment = Environment | HostEnvironment

__all__ = [
    "POOL_PREFIX",
    "Actions",
    "AnyEnvironment",
    "Continuous",
    "Discrete",
    "Environment",
    "HostEnvironment",
    "State",
    "Transition",
    "find",
    "find_on_host",
    "names",
    "register",
]

_ENVIRONMENTS = {each.name: each for each in (ACROBOT, CARTPOLE, CATCH, MOUNTAIN_CAR, PENDULUM)}


def names() -> list[str]:
    """Returns the names of the environments that run on the device."""
    return sorted(_ENVIRONMENTS)


def find(name: str) -> AnyEnvironment:
    """Returns the environment with this name.

    Raises:
      ConfigError: There is none (the message suggests similar names), or Gymnasium or EnvPool cannot create it.
    """
    if name.startswith((PREFIX, POOL_PREFIX)):
        return find_on_host(name)
    if name not in _ENVIRONMENTS:
        error = unknown_name("--env", name, names())
        raise ConfigError(
            f"{error} With --env={PREFIX}NAME, any environment of Gymnasium; with --env={POOL_PREFIX}NAME, of EnvPool."
        )
    return _ENVIRONMENTS[name]


def find_on_host(name: str) -> HostEnvironment:
    """Returns the environment of Gymnasium, or of EnvPool if the name has its prefix.

    Raises:
      ConfigError: There is no environment of this name, or the package is missing.
    """
    if name.startswith(POOL_PREFIX):
        return find_in_envpool(name.removeprefix(POOL_PREFIX))
    try:
        return find_in_gymnasium(name.removeprefix(PREFIX))
    except ConfigError as error:
        if name not in _ENVIRONMENTS:
            raise
        raise ConfigError(
            f"--env={name}: {name} exists only on the device, not in Gymnasium, so it cannot be played there. The "
            "results of its evaluations are `eval` in summary.json and the rows `eval` in metrics.csv; "
            "ReinforcementTrainer.evaluate() plays it once more."
        ) from error


def register(environment: Environment) -> None:
    """Adds an environment under its name.

    Raises:
      ConfigError: The name is taken.
    """
    if environment.name in _ENVIRONMENTS:
        raise ConfigError(f"environment {environment.name!r} exists already. Give yours another name.")
    _ENVIRONMENTS[environment.name] = environment

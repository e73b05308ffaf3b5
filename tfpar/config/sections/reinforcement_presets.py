"""The default options of reinforcement learning, by environment.

They were found by experiment: docs/reinforcement.md has the results. This module imports neither TensorFlow
nor Keras.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from tfpar.config.errors import ConfigError
from tfpar.config.sections.reinforcement import ALGORITHMS, ReinforcementConfig

_COMMON: Mapping[str, Any] = {
    "optimizer": "adam",
    "optimizer_args": "epsilon=1e-5",
    "learning_rate": 1e-3,
    "clip_norm": 0.5,
    "schedule": "cosine",
    "env_steps": 500_000,
}
_BY_ENVIRONMENT: Mapping[str, Mapping[str, Any]] = {
    "CartPole-v1": {"learning_rate": 2e-3, "env_steps": 300_000},
    "Acrobot-v1": {"learning_rate": 2e-3, "env_steps": 500_000, "entropy_coef": 0.01},
    "MountainCar-v0": {"learning_rate": 2e-3, "env_steps": 2_000_000, "entropy_coef": 0.02, "discount": 0.995},
    "Pendulum-v1": {
        "discount": 0.95,
        "eval_episodes": 256,
        "env_steps": 1_000_000,
        "gae_lambda": 0.9,
        "reward_scale": 0.1,
        "rollout_epochs": 8,
        "rollout_steps": 64,
    },
    "Catch": {"env_steps": 300_000, "entropy_coef": 0.01, "learning_rate": 2e-3},
}


_BY_ALGORITHM: Mapping[str, Mapping[str, Any]] = {
    "a2c": {"rollout_epochs": 1, "minibatches": 1, "rollout_steps": 8, "learning_rate": 3e-3},
    "dqn": {
        "rollout_epochs": 4,
        "minibatches": 1,
        "rollout_steps": 4,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "clip_norm": 10.0,
        "hidden": "128,128",
    },
}


def preset(env: str, algorithm: str = "ppo") -> dict[str, Any]:
    """Options by flag name; an environment without its own presets gets the common ones.

    Args:
      env: The environment's name, with or without `gym:` or `envpool:` in front.
      algorithm: That of `--algorithm`.
    """
    return {**_COMMON, **_BY_ENVIRONMENT.get(env.rpartition(":")[2], {}), **_BY_ALGORITHM.get(algorithm, {})}


def suited(options: Mapping[str, Any], given: Container[str]) -> dict[str, Any]:
    """Returns what suits environment and algorithm, for options that were not given.

    Args:
      options: The values of all options, by flag name; `env`, `algorithm` and `optimizer` are used.
      given: Names of the options that the user gave.

    Raises:
      ConfigError: One of them is not used by the algorithm.
    """
    check_used(options, given)
    values = preset(options["env"], options["algorithm"])
    if "steps" in given:  # the length of a run is one of two options
        values.pop("env_steps", None)
    if "optimizer" in given and options["optimizer"] != values["optimizer"]:
        values.pop("optimizer_args", None)  # those of another optimizer
    return {name: value for name, value in values.items() if name not in given}


def check_used(options: Mapping[str, Any], given: Container[str]) -> None:
    """Refuses options that the user gave and the algorithm does not use.

    Args:
      options: The values of all options, by flag name.
      given: Names of the options that the user gave.

    Raises:
      ConfigError: There is such an option; the message says which algorithms use it.
    """
    algorithm = options["algorithm"]
    unused = [
        f"--{field.name}={options[field.name]} (of {', '.join(field.metadata['used_by'])})"
        for field in dataclasses.fields(ReinforcementConfig)
        if field.name in given and algorithm not in (field.metadata["used_by"] or (algorithm,))
    ]
    if unused and algorithm in ALGORITHMS:
        raise ConfigError(
            f"--algorithm={algorithm} does not use {', '.join(unused)}. Leave out what it does not use, or choose "
            "another algorithm."
        )

"""Plays a trained policy in Gymnasium or EnvPool itself, and prints its mean return.

The environment is by default that of the run in whose workdir the model is. Needs `pip install 'tfpar[rl]'`, or
`tfpar[envpool]`.

  tfpar play --model_file=runs/cartpole/model.keras
  tfpar play --model_file=runs/cartpole/model.keras --episodes=1000 --seed=7
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence

import tfpar
from tfpar.config import ConfigError, flags

from absl import flags as absl_flags


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, plays, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    flags.define(sections=["monitor"], options=["tensorflow_log"])  # the others are about training
    absl_flags.DEFINE_string("model_file", "", "The .keras file of the policy.")
    absl_flags.DEFINE_string(
        "env",
        "",
        "Environment: its name in Gymnasium, or envpool: and its name in EnvPool; empty: that of the run.",
    )
    absl_flags.DEFINE_integer("episodes", 100, "Episodes to play.", lower_bound=1)
    absl_flags.DEFINE_integer("seed", 0, "Seed of the first episode; the others follow.", lower_bound=0)
    flags.run(main, argv, program=program)


def main(_: list[str]) -> None:
    given = absl_flags.FLAGS
    if not given.model_file:
        raise ConfigError("--model_file is missing: name a .keras file, e.g. --model_file=runs/cartpole/model.keras.")
    tfpar.check_model_file(given.model_file)
    env = given.env or trained_in(given.model_file)
    if not env:
        raise ConfigError(
            f"--env is missing, and {given.model_file} has no checkpoint next to it that names the environment of its "
            "training. Name the environment, e.g. --env=CartPole-v1."
        )
    play_file(given.model_file, env, episodes=given.episodes, seed=given.seed)


def trained_in(model_file: str) -> str:
    """Name of the environment in which the policy of a run was trained; empty if its run had none, or is not there."""
    from tfpar.checkpoint import checkpointer  # here, so that --help and a wrong flag need not wait for TensorFlow

    saved = checkpointer.saved_config(pathlib.Path(model_file).parent) or {}
    return str(saved.get("env", ""))


def check_options(model_file: str, ignored: Iterable[str]) -> None:
    """Refuses given options that have no effect because a file is a policy.

    Args:
      model_file: The .keras file of the policy.
      ignored: Names of the options that are about models of data sets.

    Raises:
      ConfigError: One of them was given.
    """
    if given := sorted(filter(flags.is_given, ignored)):
        raise ConfigError(
            f"--{given[0]} has no effect here: {model_file} is a policy of reinforcement learning, which needs no data "
            "set and acts on one device. Leave it out."
        )


def play_file(model_file: str, env: str, *, episodes: int, seed: int) -> None:
    """Plays a saved policy and prints the result to standard output, and nothing else.

    Args:
      model_file: The .keras file of the policy.
      env: As for `tfpar.rl.playing.episodes.play`.
      episodes: Likewise.
      seed: Likewise.

    Raises:
      ConfigError: Likewise.
    """
    from tfpar.rl.playing import episodes as playing

    with contextlib.redirect_stdout(sys.stderr):
        played = playing.play(tfpar.load_model(model_file), env, episodes=episodes, seed=seed)
    print(json.dumps(played.summary(env), indent=2))

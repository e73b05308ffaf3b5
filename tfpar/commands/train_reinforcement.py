r"""Learns a policy by acting in an environment that runs on the device.

tfpar train reinforcement --env=CartPole-v1 --workdir=runs/cartpole
tfpar launch --workers=2 -- tfpar train reinforcement --env=Acrobot-v1 --exchange=int8 --workdir=runs/acrobot

The defaults depend on the environment: tfpar/config/sections/reinforcement_presets.py. --env_steps or --steps sets the
length of the run; a step is a change of the weights, from one minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tfpar
from tfpar.config import SECTIONS, ExperimentConfig, flags
from tfpar.config.sections.reinforcement_presets import suited

from absl import flags as absl_flags

# There is no data set, and the model is a policy.
_SECTIONS = ("reinforcement", *(section for section in SECTIONS if section not in ("model", "input")))


def run(argv: Sequence[str] | None = None, program: str = "") -> None:
    """Defines the flags, reads them, learns, and ends the process.

    Args:
      argv: The command line; `sys.argv` by default.
      program: How a user calls it; see `flags.run`.
    """
    flags.define(sections=_SECTIONS)
    flags.run(main, argv, program=program)


def configured(values: absl_flags.FlagValues = absl_flags.FLAGS) -> ExperimentConfig:
    """Returns the configuration of the parsed flags; options that were not given suit environment and algorithm.

    Raises:
      ConfigError: A value out of range, or values that contradict each other.
    """

    def preset(options: Mapping[str, Any]) -> dict[str, Any]:
        return suited(options, {name for name in options if flags.is_given(name, values)})

    return flags.experiment_config(values, preset=preset)


def main(_: list[str]) -> None:
    tfpar.rl.ReinforcementTrainer(config=configured()).fit()

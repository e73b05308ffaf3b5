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
from tfpar.config import SECTIONS, flags
from tfpar.config.sections.reinforcement_presets import preset

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


def suited(options: Mapping[str, Any]) -> dict[str, Any]:
    """What suits environment and algorithm where nothing was given; the length of a run is one of two options."""
    values = preset(options["env"], options["algorithm"])
    if flags.is_given("steps"):
        values.pop("env_steps", None)
    return values


def main(_: list[str]) -> None:
    config = flags.experiment_config(preset=suited)
    tfpar.rl.ReinforcementTrainer(config=config).fit()

"""Programs that use only some options of a section."""

from __future__ import annotations

import dataclasses

from tfpar.config import ConfigError, flags
from tfpar.launch.cli import LaunchOptions

import pytest
from absl import flags as absl_flags

pytestmark = pytest.mark.without_keras


def test_only_the_options_that_a_program_uses_are_flags():
    values = absl_flags.FlagValues()
    flags.define(["train", "monitor"], {"seed": 3}, values, options=["seed", "verbose"])
    by_section = values.flags_by_module_dict()
    assert [[flag.name for flag in found] for found in by_section.values()] == [["seed"], ["verbose"]]
    values(["program", "--verbose=2"])
    config = flags.experiment_config(values)
    assert (config.train.seed, config.monitor.verbose, config.train.steps) == (3, 2, 0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"options": ["sed"]}, "option='sed' is not known. Did you mean 'seed'"),
        ({"options": ["seed"], "defaults": {"steps": 3}}, "default='steps' is not known. "),
    ],
)
def test_options_that_are_none_of_the_sections(keywords, message):
    with pytest.raises(ConfigError, match=message):
        flags.define(["train"], flag_values=absl_flags.FlagValues(), **keywords)


def test_every_flag_of_the_launcher_is_known_as_one():
    assert {*flags._LAUNCHER} == {field.name for field in dataclasses.fields(LaunchOptions)} - {"command"}

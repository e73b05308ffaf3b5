"""Commands in the documentation that train: their flags suit each other, and the cluster that the launcher starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from unittest import mock

from tests.docs import commands, markdown
from tests.docs.commands import Command
from tests.docs.markdown import PAGES
from tests.docs.test_docs import SHELL, block_id
from tfpar.commands import train_image, train_language
from tfpar.config import ConfigError, ExperimentConfig, catalog, flagfiles, flags
from tfpar.training.validate import validate_config

import pytest
from absl import flags as absl_flags

# The programs whose flags are those of every experiment.
PROGRAMS = {
    "tfpar/commands/train_image.py": train_image,
    "experiments/image_classification.py": train_image,
    "tfpar/commands/train_language.py": train_language,
    "experiments/language_model.py": train_language,
}


def trainings(block: markdown.Block) -> Iterator[tuple[int, Command]]:
    """The training programs of a block, each with its number of workers.

    Leaves out those with parameter servers, and with NAME for something that the reader has written.
    """
    launcher = Command("", ())
    for command in commands.commands_of(block):
        flags_of_launcher = dict(word.lstrip("-").split("=", 1) for word in launcher.arguments if "=" in word)
        own = not any("=NAME" in word for word in command.arguments)
        if own and command.program in PROGRAMS and not {"ps", "hosts"} & flags_of_launcher.keys():
            yield int(flags_of_launcher.get("workers", 1)), command
        launcher = command


BLOCKS = [block for page in PAGES for block in markdown.blocks(page) if block.language in SHELL]
TRAINING = [
    pytest.param(workers, command, id=f"{block_id(block)}-{number}")
    for block in BLOCKS
    for number, (workers, command) in enumerate(trainings(block))
]


def config_of(command: Command) -> ExperimentConfig:
    values, define = absl_flags.FlagValues(), flags.define
    absl_flags.DEFINE_string("flagfile", "", "", flag_values=values)
    with (
        mock.patch.object(flags, "define", lambda **options: define(**options, flag_values=values)),
        mock.patch.object(flags, "run"),
    ):
        PROGRAMS[command.program].run()
    values(flagfiles.resolved([command.program, *command.arguments]))
    return flags.experiment_config(values)


def check(workers: int, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program does before it reads data."""
    cluster = {"worker": [f"127.0.0.1:{10_000 + index}" for index in range(workers)]}
    if workers > 1:
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    config = config_of(command)
    catalog.check_built_in(config)
    validate_config(config)


@pytest.mark.parametrize(("workers", "command"), TRAINING)
def test_a_documented_training_is_accepted(workers, command, monkeypatch):
    check(workers, command, monkeypatch)


def test_flags_that_do_not_suit_each_other_would_be_noticed(monkeypatch):
    (command,) = commands.parse("python experiments/language_model.py --mesh=data:2,model:2 --shard=weights")
    with pytest.raises(ConfigError, match="--optimizer=muon needs whole tensors"):
        check(4, command, monkeypatch)

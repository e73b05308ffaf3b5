"""The console command `tfpar`: its subcommands, its errors, and what they cost before TensorFlow is needed."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

from tests import nursery
from tfpar.commands import cli
from tfpar.config import flagfiles

import pytest

pytestmark = pytest.mark.without_keras

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAVY = ("tensorflow", "keras", "tensorflow_datasets", "numpy")


def tfpar(
    *arguments: str, folder: pathlib.Path = ROOT, python: tuple[str, ...] = (), start: Any = subprocess.run
) -> subprocess.CompletedProcess:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, *python, "-m", "tfpar", *arguments]
    return start(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


def programs() -> dict[str, str]:
    """Each whole command, and the module that runs it."""
    found = {}
    for name, command in cli.COMMANDS.items():
        found |= {f"{name} {member}": each.module for member, each in command.members.items()}
        found |= {name: command.module} if command.module else {}
    return found


@pytest.mark.parametrize("command", ["", "train", *programs()])
def test_help_does_not_import_tensorflow(command):
    """Python's own record of imports, of the command as a person types it."""
    result = tfpar(*command.split(), "--help", python=("-X", "importtime"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {f'tfpar {command}'.strip()} ")
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "tfpar" in imported
    assert imported.isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["tfpar.inputs.write", "tfpar.exchange", "tfpar.cluster"])
def test_modules_without_a_command_have_help_and_refuse_flags_that_they_lack(module):
    def run(flag: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", module, flag]
        return nursery.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    shown = run("--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: python -m {module} ")
    refused = run("--nonesuch")
    assert refused.returncode == 2
    assert "nonesuch" in refused.stderr
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1


def test_help_names_every_command_and_its_flags():
    listed = tfpar("--help").stdout
    assert all(re.search(rf"^  {name} ", listed, re.MULTILINE) for name in cli.COMMANDS)
    flags = {
        "evaluate": "--model_file",
        "export": "--tolerance",
        "play": "--episodes",
        "train federated": "--clients_per_round",
        "train incremental": "--replay_examples",
        "train reinforcement": "--env_steps",
        "train image": "--augment",
        "launch": "--max_restarts",
    }
    for command, flag in flags.items():
        assert flag in tfpar(*command.split(), "-h").stdout


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("", "tfpar: name a command. Commands: train, plan, launch, evaluate, play, export, doctor. See tfpar --help."),
        ("trian image", "tfpar has no command 'trian'. Did you mean `tfpar train`? Commands: train, "),
        ("image", "tfpar has no command 'image'. Did you mean `tfpar train image`? "),
        ("zzz", "tfpar has no command 'zzz'. Commands: train, "),
        (
            "train",
            "tfpar train: name a command. Commands: image, language, federated, incremental, reinforcement. See tfpar ",
        ),
        ("train imag --steps=1", "tfpar train has no command 'imag'. Did you mean `tfpar train image`? "),
        ("--steps=1 train", "tfpar --steps=1: the command comes first. Commands: "),
        ("train image --stpes=1", "unknown flag --stpes. Did you mean --steps or --stages? --help lists the flags."),
        (
            "train language --workers=2",
            "--workers is the launcher's: tfpar launch --workers=2 -- tfpar train language --flag=value ...",
        ),
        ("launch --wrokers=2 -- a.py", "unknown argument --wrokers. Did you mean --workers? See tfpar launch --help."),
        (
            "train incremental --watch=. --schedule=constant --epochs=3",
            "--epochs=3 has no effect, because --watch learns from each example once, until ",
        ),
        ("evaluate --model_file=a.keras --steps=3", "unknown flag --steps. "),
        ("evaluate --model_file=a.keras --lora=4", "unknown flag --lora. "),
        (
            "evaluate --model_file=a.keras --shard=optimizer",
            "--shard=optimizer has no effect in an evaluation, which has no optimizer and no gradients. Use --shard=",
        ),
        (
            "evaluate --flagfile=quickstar.flags",
            "--flagfile=quickstar.flags: no such file. Did you mean --flag",
        ),
    ],
)
def test_errors_are_one_line_with_a_suggestion(command, error):
    result = tfpar(*command.split())
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {error}")
    assert result.stderr.count("\n") == 1


def test_the_version():
    assert re.fullmatch(r"tfpar \d+\.\d+\.\d+(\.dev\d+)?(\+tf\d+\.\d+)?\n", tfpar("--version").stdout)


def test_plans_as_json_are_all_of_the_output():
    """Progress, of which there is a line here at once, goes elsewhere."""
    plan = "from tfpar.commands import plan; from tfpar.process import activity; "
    plan += "activity._PLAIN_SECONDS = 0.0, 10.0; plan.run()"
    options = ["--json", "--rows=2", "--devices=2", "--device_flops=1e12", "--sequence_length=32"]
    command = [sys.executable, "-c", plan, *options]
    result = nursery.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert "counting transformer_lm_tiny" in result.stderr, result.stdout + result.stderr
    assert [each["mesh"] for each in json.loads(result.stdout)]


def test_every_command_has_a_program():
    for module in programs().values():
        found = importlib.import_module(module)
        assert callable(found.main if module in cli._WITH_EXIT_CODE else found.run)


def test_a_command_and_its_script_are_one_program():
    """The scripts of a checkout hold no code of their own."""
    scripts = {
        "train_image": "image_classification",
        "train_language": "language_model",
        "evaluate": "evaluate",
        "export": "export",
        "play": "play",
        "train_federated": "federated",
        "train_incremental": "incremental",
        "train_reinforcement": "reinforcement",
    }
    assert sorted(f"tfpar.commands.{name}" for name in (*scripts, "plan")) == sorted(
        module for module in programs().values() if module.startswith("tfpar.commands.")
    )
    assert "plan.run()" in (ROOT / "tfpar/plan.py").read_text()
    for module, script in scripts.items():
        assert f"{module}.run()" in (ROOT / f"experiments/{script}.py").read_text()


def test_every_recipe_of_the_wheel_is_there():
    text = (ROOT / "setup.py").read_text()
    packed = re.search(r"^RECIPES = \[(.*)\]$", text, re.MULTILINE)[1]
    for name in re.findall(r'"recipes/(.*?)"', packed):
        assert name in flagfiles.names()


# The commands at work


@pytest.mark.cluster
@pytest.mark.slow
def test_train_on_two_workers_evaluate_and_export(tmp_path):
    """In an empty folder, as from an installed package: nothing of the checkout is named."""
    flags = ["--flagfile=quickstart.flags", "--epochs=0", "--steps=40", "--warmup_steps=5", "--model=mlp"]
    here: dict[str, Any] = {"folder": tmp_path, "start": nursery.run}
    trained = tfpar("launch", "--workers=2", "--", "tfpar", "train", "image", *flags, "--workdir=run", **here)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "strategy multi_worker: 2 workers" in trained.stdout
    evaluated = tfpar("evaluate", "--model_file=run/model.keras", **here)
    assert '"examples": 360' in evaluated.stdout, evaluated.stderr
    short = ["--eval_steps=2", "--eval_batch_size=50"]
    evaluated = tfpar("evaluate", "--model_file=run/model.keras", *short, **here)
    assert '"examples": 100' in evaluated.stdout, evaluated.stderr
    exported = tfpar("export", "--model_file=run/model.keras", "--output=saved", **here)
    assert "checked on 64 examples" in exported.stdout, exported.stderr

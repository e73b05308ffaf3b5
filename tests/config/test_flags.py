"""tfpar.config.flags: the flags that exist, how they are read, and what a person sees when one is wrong."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

from tfpar.config import (
    ConfigError,
    ExchangeConfig,
    ExperimentConfig,
    TrainerOptions,
    flags,
    flags_page,
    trainer_options_file,
)
from tfpar.config.experiment import PROGRAM_SECTIONS, SECTIONS, every_field, option_fields
from tfpar.exchange import Exchange
from tfpar.training.trainer import Trainer

import pytest
from absl import flags as absl_flags

# Values of options of text that take no `a=1`.
TEXTS = {"profile_steps": "2,3", "profile_workers": "0,2", "resize": "4x5", "lora": "3"}

ROOT = Path(__file__).resolve().parents[2]

# Scripts and flagfiles of users rely on these. Adding one is fine; renaming or removing one breaks them.
FLAG_NAMES = {
    "model": "model model_args",
    "input": "dataset data_dir global_batch_size shard_by remainder uneven_batches shuffle sequence_length "
    "validation_fraction image_size resize crop augment cache on_bad_record prefetch input_threads data_service",
    "strategy": "strategy devices mesh sequence_parallel device_memory stages stage_balance stages_per_device "
    "pipeline_schedule "
    "tpu transport peer_timeout start_timeout stall_timeout",
    "exchange": "exchange exchange_retune_every",
    "outer": "local_steps round_seconds outer_optimizer outer_learning_rate outer_momentum outer_time_share "
    "outer_fragments outer_delay outer_own_share",
    "precision": "precision tf32 initial_loss_scale loss_scale_growth_steps",
    "optimizer": "optimizer optimizer_args learning_rate base_batch_size weight_decay weight_decay_exclude clip_norm "
    "ema",
    "schedule": "schedule schedule_args warmup_steps",
    "train": "steps epochs stop_after accumulate_steps loss_weighting jit_compile jit_segments trainable lora "
    "recompute shard offload steps_per_loop eval_every eval_batch_size eval_steps seed deterministic max_bad_steps",
    "checkpoint": "workdir checkpoint_every keep_checkpoints on_checkpoint_error warm_start",
    "monitor": "log_every histogram_every profile_steps profile_workers verbose tensorflow_log",
}

SCRIPT = '''
"""Trains nothing, to show its flags."""
import json
from absl import flags as absl_flags, logging
from tfpar.config import flags
from tfpar.config import ConfigError

absl_flags.DEFINE_integer("shards", 3, "Shards of this script.")
flags.define(defaults={"steps": 50, "dataset": "synthetic:8"})

def main(arguments):
    if absl_flags.FLAGS.shards == 0:
        raise ConfigError("--shards=0: there must be one.")
    if absl_flags.FLAGS.shards == -1:
        raise KeyboardInterrupt
    if absl_flags.FLAGS.shards == -2:
        raise ValueError("a defect of the program")
    config = flags.experiment_config()
    logging.info("chatter")
    logging.warning("worth knowing")
    exec(compile("logging.warning('deprecated'); logging.error('broken')", "tensorflow_datasets/feature.py", "exec"))
    print(json.dumps(config.as_flat_dict()))
    return 7 if absl_flags.FLAGS.shards == 7 else None

if __name__ == "__main__":
    flags.run(main)
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flags") / "experiment.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(
        command, env=environ, cwd=script.parent, capture_output=True, text=True, timeout=300, check=False
    )


def parse(*arguments: str, **keywords: object) -> ExperimentConfig:
    values = absl_flags.FlagValues()
    flags.define(flag_values=values, **keywords)  # type: ignore[arg-type]
    values(["program", *arguments])
    return flags.experiment_config(values)


@pytest.mark.parametrize(
    ("given", "rate"),
    [([], 0.02), (["--optimizer=muon"], 0.02), (["--optimizer=adamw"], 0.001), (["--learning_rate=0.1"], 0.1)],
)
def test_defaults_that_suit_one_optimizer_are_not_those_of_another(given, rate):
    values = absl_flags.FlagValues()
    flags.define(defaults={"optimizer": "muon", "learning_rate": 0.02, "weight_decay": 0.1}, flag_values=values)
    values(["program", *given])
    config = flags.experiment_config(values, preset=flags.for_optimizer("muon", "learning_rate"))
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (rate, 0.1)


def test_the_flags_that_exist() -> None:
    values = absl_flags.FlagValues()
    flags.define(flag_values=values)
    by_section = {module: [flag.name for flag in found] for module, found in values.flags_by_module_dict().items()}
    assert {section: by_section[f"tfpar.config.{section}"] for section in SECTIONS} == {
        section: names.split() for section, names in FLAG_NAMES.items()
    }


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert parse() == ExperimentConfig()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_flag_reaches_its_field(section: str) -> None:
    """Each field is set to something else than its default, and comes back alone."""
    for field in dataclasses.fields(SECTIONS[section]):
        default = field.default
        choices = field.metadata["choices"] or ()
        value = {
            bool: lambda d: not d,
            int: lambda d: d + 1,
            float: lambda d: 0.25 if d < 1 else d * 2,
            str: lambda _: TEXTS.get(field.name, "a=1"),  # noqa: B023
        }[type(default)](default)
        if choices:
            value = next(choice for choice in choices if choice != default)
        found = parse(f"--{field.name}={value}").as_flat_dict()
        expected = {**ExperimentConfig().as_flat_dict(), field.name: value}
        assert found == expected
        assert type(found[field.name]) is type(default)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--noshuffle"], "shuffle", False),
        (["--shuffle=0"], "shuffle", False),
        (["--deterministic"], "deterministic", True),
        (["--steps", "12"], "steps", 12),
        (["--learning_rate=3e-4"], "learning_rate", 3e-4),
        (["--clip_norm=1"], "clip_norm", 1.0),
        (["--precision=Mixed_BFloat16"], "precision", "mixed_bfloat16"),
        (["--jit_compile"], "jit_compile", "true"),
        (["--nojit_compile"], "jit_compile", "false"),
        (["--jit_compile=auto"], "jit_compile", "auto"),
        (["--jit_compile=False"], "jit_compile", "false"),
    ],
)
def test_ways_to_write_a_flag(arguments: list[str], name: str, value: object) -> None:
    assert parse(*arguments).as_flat_dict()[name] == value


def test_sections_and_defaults_of_an_experiment() -> None:
    config = parse("--steps=7", sections=("train", "model"), defaults={"steps": 50, "model": "mlp"})
    assert (config.train.steps, config.model.model) == (7, "mlp")
    with pytest.raises(absl_flags.UnrecognizedFlagError):
        parse("--dataset=digits", sections=("train",))


def test_steps_given_replace_epochs_by_default() -> None:
    config = parse("--steps=7", defaults={"epochs": 10.0})
    assert (config.train.steps, config.train.epochs) == (7, 0.0)
    config = parse("--epochs=2", defaults={"steps": 50})
    assert (config.train.steps, config.train.epochs) == (0, 2.0)
    assert parse(defaults={"epochs": 10.0}).train.epochs == 10.0
    with pytest.raises(ConfigError, match="contradict"):
        parse("--steps=7", "--epochs=2")


def test_the_old_name_of_sections_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="use sections="):
        config = parse("--steps=7", rooms=("train",))
    assert config.train.steps == 7


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"sections": ("trian",)}, "Did you mean 'train'"),
        ({"defaults": {"step": 3}}, "Did you mean 'steps'"),
        ({"defaults": {"strategy": "mirored"}}, "Did you mean 'mirrored'"),
        ({"defaults": {"global_batch_size": 0}}, "--global_batch_size=0 is out of range"),
        ({"sections": ("train",), "defaults": {"dataset": "digits"}}, "'dataset' is not known"),
    ],
)
def test_a_wrong_definition(keywords: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(**keywords)


def test_flags_survive_a_round_trip_through_a_file(tmp_path: Path) -> None:
    """absl writes a flagfile of all flags, which must read back as the same configuration."""
    given = ["--jit_compile=auto", "--nojit_compile", "--noshuffle", "--learning_rate=0.1", "--model=vit"]
    values = absl_flags.FlagValues()
    flags.define(flag_values=values)
    values(["program", *given])
    path = tmp_path / "all.flags"
    path.write_text(values.flags_into_string())
    again = absl_flags.FlagValues()
    absl_flags.DEFINE_string("flagfile", "", "", flag_values=again)
    flags.define(flag_values=again)
    again(["program", f"--flagfile={path}"])
    assert flags.experiment_config(again) == flags.experiment_config(values)


# What a person sees: a script run as such.


def test_flagfile(script: Path) -> None:
    recipe = script.parent / "recipe.flags"
    recipe.write_text("# a recipe\n--model=mlp\n--steps=9\n\n--noshuffle\n--schedule_args=milestones=[0.5,0.75]\n")
    result = run(script, f"--flagfile={recipe.name}", "--steps=10")
    assert result.returncode == 0, result.stderr
    for part in ('"model": "mlp"', '"steps": 10', '"shuffle": false', "milestones=[0.5,0.75]", '"synthetic:8"'):
        assert part in result.stdout


def test_the_exit_code_is_what_main_returns(script: Path) -> None:
    assert run(script, "--shards=7").returncode == 7


def test_log_is_quiet_unless_asked(script: Path) -> None:
    quiet, verbose = run(script), run(script, "--tensorflow_log")
    assert "worth knowing" in quiet.stderr
    assert "broken" in quiet.stderr
    for noise in ("chatter", "deprecated"):
        assert noise not in quiet.stderr
        assert noise in verbose.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step=3"], "unknown flag --step. Did you mean --steps or --stages?"),
        (["--qqq"], "unknown flag --qqq. --help lists"),
        (["--nostrategy"], "--strategy is not a switch; give it a value, as in --strategy=auto"),
        (["--steps=ten"], "--steps=ten: not a whole number."),
        (["--jit_segments=atuo"], "--jit_segments=atuo: not a whole number or auto."),
        (["--learning_rate=fast"], "--learning_rate=fast: not a number."),
        (["--epochs=ten"], "--epochs=ten: not a number. Give one that is at least 0"),
        (["--epochs=ten"], "e.g. --epochs="),
        (["--workers=2"], "--workers is the launcher's: python -m tfpar.launch --workers=2 -- "),
        (["--shuffle=perhaps"], "--shuffle=perhaps: neither true nor false."),
        (["--strategy=miror"], "--strategy=miror: must be one of auto, one_device, mirrored, multi_worker"),
        (["--strategy=miror"], "Did you mean mirrored?"),
        (["--steps"], "Missing value for flag --steps"),
        (["--shuffle", "false"], "unexpected argument 'false'"),
        (["--flagfile=none.flags"], "no such file"),
        (["--global_batch_size=0"], "--global_batch_size=0 is out of range: it must be at least 1."),
        (["--steps=3", "--epochs=2"], "contradict each other"),
        (["--model_args=width"], "is not key=value"),
        (["--shards=0"], "--shards=0: there must be one."),
    ],
)
def test_errors_are_one_line_and_exit_code_2(script: Path, arguments: list[str], expected: str) -> None:
    result = run(script, *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_defect_keeps_its_traceback(script: Path) -> None:
    result = run(script, "--shards=-2")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_an_interrupt_is_not_a_traceback(script: Path) -> None:
    result = run(script, "--shards=-1")
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_this_experiment_by_section(script: Path, flag: str) -> None:
    result = run(script, flag)
    assert (result.returncode, result.stderr) == (0, "")
    shown = result.stdout
    headings = [line.split(":")[0] for line in shown.splitlines() if line and not line.startswith((" ", "-"))]
    assert headings[:2] == ["usage", "Trains nothing, to show its flags."]
    assert headings[2:-1] == ["this script", *SECTIONS]
    for names in FLAG_NAMES.values():
        for name in names.split():
            assert f"--{name}=" in shown or f"--[no]{name}" in shown
    assert "--shards=N" in shown
    assert "Default: 50." in shown  # this experiment's, not the dataclass's
    assert "One of: auto, one_device" in " ".join(shown.split())
    assert "pdb" not in shown  # absl's own flags stay in --helpfull
    assert max(map(len, shown.splitlines())) <= 110


def test_helpfull_shows_absl_too(script: Path) -> None:
    shown = run(script, "--helpfull").stdout
    assert "--[no]pdb" in shown
    assert "--global_batch_size" in shown


def test_reading_flags_does_not_import_tensorflow(script: Path) -> None:
    code = "import sys, tfpar.config.flags as f; f.define(); assert not {'tensorflow', 'keras'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["image_classification", "language_model", "evaluate", "export"])
def test_help_of_an_experiment_and_a_wrong_flag_do_not_wait_for_tensorflow(name: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", f"experiments/{name}.py"]
    for argument, code in (("--help", 0), ("--stepps=3", 2)):
        result = subprocess.run(
            [*command, argument], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == code
        lines = [line for line in result.stderr.splitlines() if line.startswith("import time")]
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
        assert "tfpar" in imported
        assert not imported & {"tensorflow", "keras", "tensorflow_datasets", "numpy"}


def test_an_option_given_as_zero_is_given():
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_float("validation_fraction", 0.1, "", flag_values=values)
    absl_flags.DEFINE_integer("seed", 0, "", flag_values=values)
    values(["script", "--validation_fraction=0"])
    assert flags.is_given("validation_fraction", values)
    assert not flags.is_given("seed", values)
    assert not flags.is_given("dataset", values)


def test_the_help_names_exchanges_that_exist() -> None:
    """A few of them, and the command that lists all: a new one changes nothing here."""
    help_text = ExchangeConfig.__dataclass_fields__["exchange"].metadata["help"]
    with pytest.raises(ConfigError) as caught:
        Exchange("nonesuch")
    names = re.search(r"Known: (.*)\.$", str(caught.value))[1].split(", ")
    named = [name for name in names if re.search(rf"\b{name}\b", help_text)]
    assert {"none", "auto", "int4", "topk", "powersgd"} <= set(named)
    assert "python -m tfpar.exchange" in help_text


# The reference page.


def test_the_flags_page_is_up_to_date() -> None:
    assert (ROOT / flags_page.PAGE).read_text() == flags_page.page(), "run python -m tfpar.config.flags_page"


def test_the_flags_page_has_a_row_for_every_option(tmp_path: Path) -> None:
    flags_page.main([str(tmp_path / "docs" / "flags.md")])
    text = (tmp_path / "docs" / "flags.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert len(rows) == len(every_field())
    for field, row in zip(every_field(), rows, strict=True):
        assert re.match(rf"\| `--(\[no\])?{field.name}` \| ", row)
        assert field.metadata["help"].replace("|", r"\|") in row
        assert len(re.findall(r"(?<!\\)\|", row)) == 5  # four cells: every other bar is escaped
    assert "| `--validation_fraction` | `0.1` | number, at least 0 and at most 0.9 |" in text
    assert "| `--[no]shuffle` | `true` | `true`, `false` |" in text
    for heading in SECTIONS | PROGRAM_SECTIONS:
        assert f"\n## {heading}\n" in text


def test_the_types_of_the_options_are_up_to_date(tmp_path: Path) -> None:
    file = trainer_options_file.FILE
    command = "python -m tfpar.config.trainer_options_file"
    assert (ROOT / file).read_text() == trainer_options_file.text(), f"run {command}"
    trainer_options_file.main([str(tmp_path / "options.py")])
    assert (tmp_path / "options.py").read_text() == trainer_options_file.text()


def test_every_option_has_a_type_that_takes_its_default() -> None:
    hints = typing.get_type_hints(TrainerOptions)
    arguments = set(inspect.signature(Trainer).parameters)
    fields = {field.name: field for field in option_fields() if field.name not in trainer_options_file.ARGUMENTS}
    assert hints.keys() == fields.keys()
    assert hints.keys().isdisjoint(arguments)  # a type checker refuses the signature otherwise
    assert set(trainer_options_file.ARGUMENTS) < arguments
    for name, field in fields.items():
        allowed = [each for part in alternatives(hints[name]) for each in typing.get_args(part) or (part,)]
        assert field.default in allowed or type(field.default) in allowed, name
    assert inspect.signature(Trainer).parameters["options"].annotation == "Unpack[TrainerOptions]"


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of another type, the type itself."""
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if union else (annotation,)

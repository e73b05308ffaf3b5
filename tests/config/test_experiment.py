"""tfpar.config: what a configuration may say, and how a wrong one is answered."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

from tests.config.test_flags import TEXTS
from tfpar.config import (
    ConfigError,
    ExperimentConfig,
    InputConfig,
    MonitorConfig,
    TrainConfig,
    unknown_name,
)
from tfpar.config.experiment import PER_HOST_OPTIONS, RESUME_MAY_CHANGE, SECTIONS, every_field
from tfpar.config.fields import ConfigBase, option

import numpy as np
import pytest

FIELDS = [(kind, field) for kind in SECTIONS.values() for field in dataclasses.fields(kind)]


# Choices and bounds: every field that declares them.


@pytest.mark.parametrize(
    ("kind", "field"),
    [pytest.param(kind, field, id=field.name) for kind, field in FIELDS if field.metadata["choices"]],
)
def test_choices(kind, field):
    for choice in field.metadata["choices"]:
        assert getattr(kind(**{field.name: choice}), field.name) == choice
    nearly = field.metadata["choices"][-1] + "x"
    with pytest.raises(ConfigError) as caught:
        kind(**{field.name: nearly})
    message = str(caught.value)
    assert f"--{field.name}={nearly!r}" in message
    assert f"Did you mean {field.metadata['choices'][-1]!r}" in message
    assert all(choice in message for choice in field.metadata["choices"])


@pytest.mark.parametrize(
    ("kind", "field", "bound", "outside"),
    [
        pytest.param(kind, field, field.metadata[side], field.metadata[side] + step, id=f"{field.name}-{side}")
        for kind, field in FIELDS
        for side, step in (("minimum", -1), ("maximum", 1))
        if field.metadata[side] is not None
    ],
)
def test_bounds_belong_to_the_range_and_what_lies_beyond_does_not(kind, field, bound, outside):
    value = type(field.default)(bound)
    assert getattr(kind(**{field.name: value}), field.name) == value
    with pytest.raises(ConfigError) as caught:
        kind(**{field.name: type(field.default)(outside)})
    message = str(caught.value)
    assert f"--{field.name}={type(field.default)(outside)} is out of range" in message
    for word, side in (("at least", "minimum"), ("at most", "maximum")):
        declared = field.metadata[side]
        assert (f"{word} {declared}" in message) == (declared is not None)


@pytest.mark.parametrize(
    ("kind", "field"),
    [pytest.param(kind, field, id=field.name) for kind, field in FIELDS if type(field.default) is float],
)
def test_not_a_number_is_refused(kind, field):
    with pytest.raises(ConfigError, match=f"--{field.name}=nan is not a finite number"):
        kind(**{field.name: float("nan")})


def test_every_number_is_bounded_and_every_option_has_a_help_text():
    for kind, field in FIELDS:
        if type(field.default) in (int, float):
            assert field.metadata["minimum"] is not None, (kind, field.name)
        assert field.metadata["help"].rstrip().endswith((".", "?")), (kind, field.name)


def test_the_names_of_options_are_unique_over_all_sections():
    found = [field.name for _, field in FIELDS]
    assert len(found) == len(set(found))


def test_configurations_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3
    with pytest.raises(TypeError):
        TrainConfig(3)  # by name only


def test_steps_and_epochs_contradict_each_other():
    assert (TrainConfig(steps=3).epochs, TrainConfig(epochs=2.5).steps) == (0, 0)
    with pytest.raises(ConfigError, match=r"--steps=3 and --epochs=2\.5 contradict each other: give one of them"):
        TrainConfig(steps=3, epochs=2.5)


@pytest.mark.parametrize(("text", "window"), [("", None), ("10,15", (10, 15)), ("3,3", (3, 3)), (" 0 , 2 ", (0, 2))])
def test_profile_window(text, window):
    assert MonitorConfig(profile_steps=text).profile_window() == window


@pytest.mark.parametrize("text", ["10", "15,10", "-1,3", "1,2,3", "a,b", ",", "1.5,2"])
def test_a_wrong_profile_window_shows_a_right_one(text):
    with pytest.raises(ConfigError) as caught:
        MonitorConfig(profile_steps=text)
    assert f"--profile_steps={text!r}" in str(caught.value)
    assert "--profile_steps=10,15" in str(caught.value)


def test_workers_to_profile_are_named_by_rank():
    assert [MonitorConfig().profiles(rank) for rank in (0, 1)] == [True, False]
    assert [MonitorConfig(profile_workers="2, 0").profiles(rank) for rank in range(4)] == [True, False, True, False]
    assert MonitorConfig(profile_workers="all").profiles(5)
    for text in ("", "a", "-1", "0;1"):
        with pytest.raises(ConfigError, match="--profile_workers=all"):
            MonitorConfig(profile_workers=text)


# The whole configuration.


def test_flat_dict_round_trip():
    flat = ExperimentConfig().as_flat_dict()
    assert set(flat) == {field.name for _, field in FIELDS}
    assert ExperimentConfig.from_flat_dict(flat) == ExperimentConfig()
    assert ExperimentConfig.from_flat_dict({}) == ExperimentConfig()


@pytest.mark.parametrize(("kind", "field"), [pytest.param(kind, field, id=field.name) for kind, field in FIELDS])
def test_each_option_reaches_its_section_and_survives_json(kind, field):
    choices = field.metadata["choices"]
    changed = {
        bool: lambda: not field.default,
        int: lambda: field.default + 1,
        float: lambda: 0.25 if field.default < 1 else 2 * field.default,
        str: lambda: TEXTS.get(field.name, "a=1"),
    }[type(field.default)]()
    if choices:
        changed = next(choice for choice in choices if choice != field.default)
    config = ExperimentConfig.from_flat_dict({field.name: changed})
    section = next(name for name, section in SECTIONS.items() if section is kind)
    assert getattr(getattr(config, section), field.name) == changed
    flat = config.as_flat_dict()
    assert {name for name, value in flat.items() if value != ExperimentConfig().as_flat_dict()[name]} == {field.name}
    assert ExperimentConfig.from_flat_dict(json.loads(json.dumps(flat))) == config


def test_a_custom_section_with_optional_and_other_types():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Window(ConfigBase):
        size: int | None = option(None, "Size.", minimum=1)
        names: tuple[str, ...] = option((), "Names.")

    assert (Window().size, Window(size=2.0).size, Window(names=("a",)).names) == (None, 2, ("a",))
    with pytest.raises(ConfigError, match="--size='2' is not a whole number"):
        Window(size="2")
    with pytest.raises(ConfigError, match="--size=0 is out of range: it must be at least 1"):
        Window(size=0)


# What may differ between two starts of a run, and between the workers of one. A new option belongs here or not by its
# meaning: decide it where the option is defined, then say so here.


def test_the_options_that_a_resumed_run_may_change():
    assert sorted(RESUME_MAY_CHANGE) == [
        *("accumulate_steps", "actors", "cache", "checkpoint_every", "clients_evaluated", "data_dir", "data_service"),
        *("delivery_examples", "delivery_seconds", "deterministic"),
        *("device_memory", "devices", "env_processes", "env_steps"),
        *(
            "epochs",
            "eval_batch_size",
            "eval_episodes",
            "eval_every",
            "eval_steps",
            "exchange",
            "exchange_retune_every",
            "export_every",
        ),
        *("histogram_every", "idle_seconds", "input_threads", "jit_compile", "jit_segments"),
        *("keep_checkpoints", "keep_exports"),
        *("local_steps", "log_every"),
        *(
            "max_bad_steps",
            "mesh",
            "offload",
            "on_bad_record",
            "on_checkpoint_error",
            "outer_delay",
            "outer_learning_rate",
        ),
        *("outer_momentum", "outer_own_share", "outer_time_share"),
        *("peer_timeout", "pipeline_schedule", "prefetch", "profile_steps"),
        *(
            "profile_workers",
            "recompute",
            "round_seconds",
            "rounds",
            "sequence_parallel",
            "shard",
            "stage_balance",
            "stages",
            "stages_per_device",
            "stall_timeout",
            "start_timeout",
            "steps",
            "steps_per_loop",
            "stop_after",
            "stop_at_goal",
            "strategy",
            "tensorflow_log",
        ),
        *("tf32", "tpu", "transport", "uneven_batches", "verbose", "warm_start", "watch", "watch_every"),
        "workdir",
    ]


def test_the_options_that_workers_may_be_given_differently():
    assert sorted(PER_HOST_OPTIONS) == [
        *("cache", "data_dir", "data_service", "dataset", "devices", "input_threads", "keep_checkpoints"),
        *("on_checkpoint_error", "peer_timeout", "prefetch", "stall_timeout", "start_timeout", "strategy"),
        *("tensorflow_log", "tpu", "verbose", "warm_start", "watch", "workdir"),
    ]


def test_both_sets_are_derived_from_the_options():
    for names, key in ((RESUME_MAY_CHANGE, "may_change_on_resume"), (PER_HOST_OPTIONS, "per_host")):
        assert names == {field.name for field in every_field() if field.metadata[key]}
    assert not option(0, "Width.").metadata["may_change_on_resume"]  # refused unless the option says otherwise
    assert not option(0, "Width.").metadata["per_host"]


def test_an_unknown_option_gets_suggestions():
    with pytest.raises(ConfigError, match=r"option='learning_rates' is not known\. Did you mean 'learning_rate'"):
        ExperimentConfig.from_flat_dict({"steps": 3, "learning_rates": 0.1})


def test_an_invalid_value_is_refused_before_an_unknown_name_is_looked_for():
    with pytest.raises(ConfigError, match="--global_batch_size=0 is out of range: it must be at least 1"):
        ExperimentConfig.from_flat_dict({"global_batch_size": 0, "nonsense": 1})


def test_from_flat_dict_leaves_its_argument_alone():
    given_options = {"steps": 3}
    ExperimentConfig.from_flat_dict(given_options)
    assert given_options == {"steps": 3}


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("resnet19", "Did you mean 'resnet18' or 'resnet34'?"),
        ("qqqq", "is not known. Known: mlp, resnet18, resnet34, vit."),
    ],
)
def test_unknown_names_suggest_what_is_near_and_list_what_is_known(value, hint):
    error = unknown_name("--model", value, ["vit", "resnet34", "resnet18", "mlp"])
    assert isinstance(error, ValueError)
    assert hint in str(error)
    assert str(error).startswith(f"--model={value!r}")
    assert "Known: mlp, resnet18, resnet34, vit." in str(error)


def test_a_custom_section_is_checked_the_same_way():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Shape(InputConfig):
        sides: int = option(3, "Sides.", minimum=3, maximum=9)

    assert Shape(sides=9).sides == 9
    with pytest.raises(ConfigError, match="--sides=10 is out of range: it must be at least 3 and at most 9"):
        Shape(sides=10)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("steps", 2.5, "not a whole number"),
        ("steps", "8", "not a whole number"),
        ("steps", True, "not a whole number"),
        ("jit_segments", "atuo", "not a whole number or auto"),
        ("lora", True, "not a string"),
        ("steps", math.inf, "not a whole number"),
        ("learning_rate", "0.1", "not a finite number"),
        ("learning_rate", math.inf, "not a finite number"),
        ("learning_rate", math.nan, "not a finite number"),
        ("deterministic", 1, "not true or false"),
        ("model", None, "not a string"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, value, complaint):
    with pytest.raises(ConfigError, match=rf"--{name}=.*{complaint}"):
        ExperimentConfig.from_flat_dict({name: value})


def test_values_that_lose_nothing_are_converted():
    config = ExperimentConfig.from_flat_dict(
        {
            "steps": np.int64(8),
            "learning_rate": 1,
            "epochs": np.float32(0.0),
            "workdir": pathlib.Path("runs") / "a",
            "lora": 8,
        }
    )
    assert config.train.adapters() == (8, "")
    assert (config.train.steps, config.optimizer.learning_rate, config.checkpoint.workdir) == (8, 1.0, "runs/a")
    assert type(config.train.steps) is int
    assert type(config.optimizer.learning_rate) is float


def test_an_error_says_how_its_flags_are_written_in_python():
    with pytest.raises(ConfigError) as caught:
        ExperimentConfig.from_flat_dict({"stop_after": -1})
    assert "--stop_after" in str(caught.value)
    assert caught.value.__notes__ == ["In Python, options are keyword arguments: stop_after=..."]
    assert not hasattr(ConfigError("tfds build NAME --file_format=array_record"), "__notes__")


def test_an_unknown_option_of_a_program_gets_the_suggestions_of_that_program():
    with pytest.raises(ConfigError, match=r"option='client' is not known\. Did you mean 'clients'"):
        ExperimentConfig.from_flat_dict({"client": 3}, program="federated")
    with pytest.raises(ConfigError, match=r"option='env_step' is not known\. Did you mean 'env_steps'"):
        ExperimentConfig.from_flat_dict({"env_step": 3, "env": "CartPole-v1"})
    with pytest.raises(ConfigError, match="is not known") as caught:
        ExperimentConfig.from_flat_dict({"client": 3})
    assert "clients" not in str(caught.value)

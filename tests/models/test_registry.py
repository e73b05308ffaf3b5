"""Names, options, and the errors for unknown ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from tfpar import models
from tfpar.config import ConfigError, parse_arguments
from tfpar.models import registry
from tfpar.models.registry import TaskSpec

import keras
import pytest

DIGITS = TaskSpec("classification", (8, 8, 1), "float32", 10)
TEXT = TaskSpec("language_model", (16,), "int32", 256)


def test_names_include_every_family_and_preset() -> None:
    assert set(models.names()) == {
        "convnet",
        "mlp",
        "resnet18",
        "resnet34",
        "resnet50",
        "transformer_lm_gpt2",
        "transformer_lm_small",
        "transformer_lm_tiny",
        "vit",
        "vit_base",
        "vit_small",
        "vit_tiny",
    }
    assert list(models.names()) == sorted(models.names())


def test_the_error_for_an_unknown_model_suggests_names() -> None:
    with pytest.raises(ConfigError, match=r"--model='resnet19' is not known.*Did you mean 'resnet18'"):
        models.build("resnet19", DIGITS)


def test_the_error_for_an_unknown_option_lists_the_options() -> None:
    with pytest.raises(ConfigError) as error:
        models.build("convnet", DIGITS, drop_out=0.1)
    message = str(error.value)
    assert "--model_args" in message
    assert "'drop_out'" in message
    assert "Did you mean 'dropout'" in message
    for option in ("widths", "kernel_size", "activation", "initializer", "normalization", "dropout"):
        assert option in message


def test_arguments_override_a_preset_and_the_preset_names_the_model() -> None:
    model = models.build("vit", DIGITS, depth=2, width=32, heads=2)
    assert model.name == "vit"
    assert sum(layer.name.startswith("block") for layer in model.layers) == 2


def test_options_show_the_values_of_the_preset() -> None:
    assert models.options("resnet18")["blocks"] == (2, 2, 2, 2)
    assert models.options("resnet50") == {**models.options("resnet34"), "bottleneck": True}


@pytest.mark.parametrize("name", ["mlp", "convnet", "resnet18", "vit"])
def test_classifiers_refuse_text(name: str) -> None:
    with pytest.raises(ConfigError, match=r"for the task 'classification'.*'language_model'.*--dataset"):
        models.build(name, TEXT)


def test_a_language_model_refuses_images() -> None:
    with pytest.raises(ConfigError, match=r"for the task 'language_model'.*'classification'.*--dataset=text"):
        models.build("transformer_lm_tiny", DIGITS)


def test_convolutions_refuse_flat_features() -> None:
    with pytest.raises(ConfigError, match=r"\(30,\).*--model=mlp"):
        models.build("convnet", TaskSpec("classification", (30,), "float32", 2))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mlp", {"activation": "rellu"}, "--model_args activation='rellu' is not known.*Did you mean 'relu'"),
        ("mlp", {"initializer": "he"}, "--model_args initializer='he' is not known"),
        ("convnet", {"normalization": "batchnorm"}, "--model_args normalization='batchnorm'.*sync_batch"),
        ("convnet", {"dropout": 1.0}, "--model_args dropout=1.0 is out of range"),
        ("mlp", {"widths": [64, 0]}, r"--model_args widths=\[64, 0\] must be a positive whole number"),
        ("resnet18", {"stem": "tiny"}, "--model_args stem='tiny'.*cifar, imagenet"),
        ("resnet18", {"blocks": [1, 1, 1, 1, 1]}, "--model_args=blocks=.*5 stages"),
        ("vit", {"heads": 5}, "width=192,heads=5: the heads must divide"),
        ("vit", {"patch_size": 3}, "patch_size=3 does not divide the image of 8x8"),
        ("vit", {"pool": "max"}, "--model_args pool='max'"),
        ("vit", {"normalization": "batch"}, "--model_args normalization='batch'.*layer, rms"),
        ("vit", {"depth": 0}, "--model_args depth=0 must be a positive whole number"),
    ],
)
def test_errors_for_bad_values_name_the_flag(name: str, arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.build(name, DIGITS, **arguments)


def test_build_accepts_options_as_the_flag_parses_them() -> None:
    text = "widths=[16,16],normalization=none,activation=gelu_tanh"
    arguments = parse_arguments("--model_args", text, example="depth=2")
    assert models.build("mlp", DIGITS, **arguments).count_params() == 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("regression", (4,), "float32", 1), "task='regression' is not known"),
        (("classification", (8, 0, 1), "float32", 2), "every dimension"),
        (("classification", (4,), "float32", 0), "num_classes=0"),
        (("language_model", (8, 8), "int32", 9), "one sequence of tokens"),
        (("language_model", (8,), "float32", 9), "tokens are integers"),
    ],
)
def test_an_invalid_task_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskSpec(*arguments)


def test_specs_compare_by_value() -> None:
    assert TaskSpec("classification", [8, 8, 1], "float32", 10) == DIGITS  # type: ignore[arg-type]


def test_registering_checks_name_and_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))

    def linear(spec: TaskSpec, *, use_bias: bool = True) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input(spec.input_shape),
                keras.layers.Flatten(),
                keras.layers.Dense(spec.num_classes, use_bias=use_bias),
            ]
        )

    with pytest.raises(ValueError, match="already taken"):
        models.register("mlp")(linear)
    with pytest.raises(ValueError, match="bias"):
        models.register("linear", bias=False)(linear)
    models.register("linear", use_bias=False)(linear)
    assert models.build("linear", DIGITS).count_params() == 640
    assert models.build("linear", DIGITS, use_bias=True).count_params() == 650


def test_an_option_without_a_default_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))

    @models.register("needs_units")
    def needs_units(spec: TaskSpec, *, units: int) -> keras.Model:
        return keras.Sequential([keras.Input(spec.input_shape), keras.layers.Dense(units)])

    with pytest.raises(ConfigError, match="--model=needs_units needs --model_args to set units"):
        models.build("needs_units", DIGITS)


def test_integer_features_are_refused() -> None:
    with pytest.raises(ConfigError, match="input_dtype='int32'"):
        models.build("mlp", TaskSpec("classification", (8,), "int32", 2))


@pytest.mark.parametrize(
    ("hint", "valid", "invalid"),
    [
        (bool, [True], [1, "no"]),
        (float, [1, 0.5], [True, "1"]),
        (int | None, [3, None], [0.5, "none"]),
        (tuple[int, ...], [[1, 2], (), 3], [[1, 0.5], "1"]),
        # The builder itself checks everything but numbers, booleans and sequences.
        (str, ["gelu", None], []),
        (Literal["sum", "mean"], ["sum", 3], []),
        (tuple[int, float], [[1, 0.5]], []),
        (Callable[[int], int], ["relu"], []),
        (Any, [object()], []),
    ],
)
def test_values_are_checked_against_the_annotations_of_a_builder(hint, valid, invalid):
    assert all(registry._matches_hint(value, hint) for value in valid)
    assert not any(registry._matches_hint(value, hint) for value in invalid)


def test_annotations_that_only_type_checkers_resolve_are_accepted():
    def builder(spec, *, scale: "Unknown" = 1): ...  # noqa: F821, UP037

    assert registry._hints(builder) == {}

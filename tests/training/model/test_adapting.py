"""Training part of a model: weights by their paths, and adapters beside frozen kernels."""

from __future__ import annotations

import json
import re

import tfpar
from tests.training.model.test_building import source
from tfpar.config import ConfigError
from tfpar.training.model.adapting import is_adapter, merge_adapters

import keras
import numpy as np
import pytest

layers = keras.layers


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    block = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6, name="inner"), layers.BatchNormalization(name="norm")], name="block"
    )
    inputs = keras.Input((4,))
    hidden = block(layers.Dense(6, activation="tanh", name="first")(inputs))
    return keras.Model(inputs, layers.Dense(1, name="last")(hidden))


def attention() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = layers.Reshape((2, 2))(inputs)
    x = layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    return keras.Model(inputs, layers.Dense(1, name="last")(layers.Flatten()(x)))


def trained(given, steps: int = 3, **options) -> tfpar.Trainer:
    options = {"global_batch_size": 8, "jit_compile": False, "learning_rate": 0.1, "verbose": 0, **options}
    trainer = tfpar.Trainer(given, "adam", "mse", **({"strategy": "one_device"} | options))
    trainer.fit(source(), steps=steps)
    return trainer


def changed(trainer: tfpar.Trainer, start: dict[str, np.ndarray]) -> set[str]:
    """Paths of the weights that differ from those at the start; adapters have no start."""
    now = {weight.path: np.asarray(weight) for weight in trainer.model.weights}
    return {path for path, value in now.items() if path not in start or (value != start[path]).any()}


def starts(given: keras.Model) -> dict[str, np.ndarray]:
    return {weight.path: np.asarray(weight) for weight in given.weights}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("last", {"last/kernel", "last/bias"}),
        ("bias$", {"first/bias", "inner/bias", "last/bias"}),
        (
            "all",
            {
                *("first/kernel", "first/bias", "inner/kernel", "inner/bias", "last/kernel", "last/bias"),
                *("norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"),
            },
        ),
    ],
)
def test_weights_that_a_pattern_finds_are_trained(pattern, expected, messages):
    given = model()
    start = starts(given)
    trainer = trained(given, trainable=pattern, verbose=1)
    assert {"/".join(path.split("/")[-2:]) for path in changed(trainer, start)} == expected
    trainable = trainer.model.trainable_variables
    # Adam has two numbers for each, and two of its own.
    assert len(trainer.program.optimizer.variables) == 2 * len(trainable) + 2
    count = sum(int(np.prod(weight.shape)) for weight in trainable)
    assert any(line.startswith(f"training {count:,} of 103 parameters") for line in messages), messages


def test_a_layer_that_never_learned_stays_as_it_is():
    """Batch normalisation without gamma and beta."""
    norm = layers.BatchNormalization(center=False, scale=False, name="norm")
    given = keras.Sequential([keras.Input((4,)), norm, layers.Dense(1, name="last")])
    start = starts(given)
    assert "norm/moving_mean" in {
        "/".join(path.split("/")[-2:]) for path in changed(trained(given, trainable="all"), start)
    }


def test_adapters_alone_are_trained_and_begin_as_nothing(messages):
    given = attention()
    start = starts(given)
    x = np.random.default_rng(1).normal(size=[3, 4]).astype(np.float32)
    before = given.predict(x, verbose=0)
    options = {"strategy": "one_device", "global_batch_size": 8, "jit_compile": False, "verbose": 1}
    trainer = tfpar.Trainer(given, "adam", "mse", lora="2", **options)
    np.testing.assert_array_equal(given.predict(x, verbose=0), before)
    assert any("adapters of rank 2 in 2 layers (attention/query, attention/value)" in line for line in messages)
    trainer.fit(source(), steps=3)
    moved = changed(trainer, start)
    assert {path.rpartition("/")[2] for path in moved} == {"lora_kernel_a", "lora_kernel_b"}
    assert len(moved) == 4
    assert all(is_adapter(weight) for weight in trainer.model.trainable_variables)


def test_adapters_on_two_replicas_are_those_on_one_and_come_back():
    """The given model, of which a copy is trained, has the same adapters afterwards."""
    one, given = attention(), attention()
    trained(one, lora="2:(query|last)$", trainable="last/bias")
    trained(given, lora="2:(query|last)$", trainable="last/bias", strategy="mirrored", devices=2)
    assert [weight.path.split("/")[-1] for weight in one.weights] == [w.path.split("/")[-1] for w in given.weights]
    for first, second in zip(one.weights, given.weights, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)
    assert [w.name for w in given.trainable_variables if not is_adapter(w)] == ["bias"]


def test_without_attention_every_dense_layer_has_adapters_and_saving_merges_them(tmp_path):
    trainer = trained(model(), lora="1", workdir=str(tmp_path))
    assert sum(map(is_adapter, trainer.model.weights)) == 6
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["trainable_parameters"] == (4 + 6) + (6 + 6) + (6 + 1)
    assert summary["parameters"] == trainer.model.count_params()
    x = np.random.default_rng(1).normal(size=[5, 4]).astype(np.float32)
    expected = trainer.model.predict(x, verbose=0)
    saved = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(saved.predict(x, verbose=0), expected, atol=1e-6)
    loaded = saved.predict(x, verbose=0)
    assert merge_adapters(saved) == 3
    saved.predict_function = None
    np.testing.assert_array_equal(saved.predict(x, verbose=0), loaded)


def named(*names: str) -> keras.Model:
    """Dense layers with these names, side by side."""
    inputs = keras.Input((4,))
    outputs = [layers.Dense(4, name=name)(inputs) for name in names]
    return keras.Model(inputs, layers.Concatenate()(outputs))


@pytest.mark.parametrize(
    ("names", "adapted"),
    [
        (("policy", "value"), {"policy", "value"}),  # an actor and a critic
        (("advantage", "state_value"), {"advantage", "state_value"}),
        (("query", "first_value"), {"query", "first_value"}),
        (("query", "key", "value"), {"query", "value"}),
        (("a_query_proj", "a_value_proj", "value", "last"), {"a_query_proj", "a_value_proj"}),
        (("qkv", "value"), {"qkv"}),
    ],
)
def test_a_query_and_a_value_side_by_side_are_attention(names, adapted):
    trainer = tfpar.Trainer(named(*names), "adam", "mse", lora="1", strategy="one_device")
    assert {layer.name for layer in trainer.model.layers if getattr(layer, "lora_enabled", False)} == adapted


def test_weights_that_never_learn_are_no_suggestions():
    norm = layers.BatchNormalization(center=False, scale=False, name="norm")
    given = keras.Sequential([keras.Input((4,)), norm, layers.Dense(1, name="last")])
    with pytest.raises(
        ConfigError, match=r"no weight that can learn\. Paths are such as \S*last/kernel, \S*last/bias\."
    ):
        tfpar.Trainer(given, "adam", "mse", trainable="norm", strategy="one_device")


def test_a_layer_that_is_trained_in_full_has_no_adapters(messages):
    trainer = trained(model(), lora="1", trainable="(^|/)last/", verbose=1)
    names = {weight.path.split("/", 1)[0] for weight in trainer.model.weights if is_adapter(weight)}
    assert "last" not in names
    assert sum(map(is_adapter, trainer.model.weights)) == 4
    assert any(re.match(r"training 29 of 125 parameters \(23 %\): adapters of rank 1 in 2", line) for line in messages)


def test_shares_of_weights_are_written_without_exponents(messages):
    trained(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), trainable="all", verbose=1)
    assert any(line.startswith("training 5 of 5 parameters (100 %)") for line in messages)


def test_a_run_with_adapters_resumes_bit_by_bit(tmp_path):
    whole = trained(attention(), steps=6, lora="2")
    trained(attention(), steps=6, lora="2", stop_after=3, workdir=str(tmp_path))
    resumed = trained(attention(), steps=6, lora="2", workdir=str(tmp_path))
    for one, two in zip(whole.model.weights, resumed.model.weights, strict=True):
        np.testing.assert_array_equal(one, two)
    steps = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(steps) > 1
    assert len({(step / "state-frozen.safetensors").stat().st_ino for step in steps}) == 1
    with pytest.raises(ConfigError, match=r"warm_start=.* has adapters that this model lacks .*lora_kernel_a"):
        trained(attention(), warm_start=str(tmp_path))
    with pytest.raises(ConfigError, match=r"--lora: '2' -> '3'"):
        trained(attention(), steps=8, lora="3", workdir=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"trainable": "decoder"},
            r"--trainable='decoder' matches no weight that can learn. Paths are such as first/[^.]* and [0-9]+ more",
        ),
        ({"trainable": "("}, r"--trainable='\(' is not a regular expression"),
        ({"lora": "4:("}, r"--lora='4:\(': '\(' is not a regular expression"),
        ({"lora": "x"}, r"--lora='x' is not RANK or RANK:REGEX"),
        ({"lora": "0"}, r"--lora='0' is not RANK or RANK:REGEX"),
        ({"lora": "4:"}, r"--lora='4:' is not RANK or RANK:REGEX"),
        (
            {"lora": "100000"},
            r"--lora=100000: adapters of rank 100000 have as many weights .*Give a rank of at most 2, or train",
        ),
        ({"lora": "2:last$"}, r"--lora=2:last\$: adapters of rank 2 .*Leave --lora out, and train the kernels"),
        ({"lora": "1", "trainable": "all"}, r"--lora=1: --trainable=all trains the kernels of all layers that would"),
        (
            {"lora": "4:norm"},
            r"--lora=4:norm: no layer that can.*Layers that can: block/inner, first, last",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        tfpar.Trainer(model(), "adam", "mse", **({"strategy": "one_device"} | options))


def test_a_layer_with_a_constraint_is_named():
    given = keras.Sequential([keras.Input((4,)), layers.Dense(3, kernel_constraint="non_neg", name="bound")])
    with pytest.raises(ConfigError, match=r"--lora=1: \S*bound cannot have adapters: Lora is incompatible"):
        tfpar.Trainer(given, "adam", "mse", lora="1", strategy="one_device")


@pytest.mark.parametrize(
    ("pattern", "warned"),
    [
        ("^lost|^last", ["--trainable=^lost|^last: no weight that can learn matches '^lost'."]),
        ("^a|^last|^z", ["--trainable=^a|^last|^z: no weight that can learn matches '^a' or '^z'."]),
        ("^first|^last", []),
        ("^(lost|last)", []),  # inside a group, an alternative is no expression of its own
        ("last|[|]|\\|", []),
    ],
)
def test_a_warning_names_alternatives_without_a_weight(pattern, warned, caplog):
    tfpar.Trainer(model(), "adam", "mse", strategy="one_device", trainable=pattern)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == warned

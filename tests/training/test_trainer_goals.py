"""`Trainer` with several outputs, sample weights and compiled models: equal to `fit` on one whole batch."""

from __future__ import annotations

import tfpar
from tests.training.goals import LEARNING_RATE, fit
from tests.training.test_goals import (
    EXAMPLES,
    TWO_HEADS,
    classes,
    floats,
    recurrent,
    sparse,
    tokens,
    two_heads,
    two_tasks,
    weights,
)
from tfpar import inputs
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest

OPTIONS = {"strategy": "mirrored", "devices": 2, "global_batch_size": EXAMPLES, "jit_compile": False}


def heads_data():
    return floats(4), {"size": floats(2, seed=8), "kind": classes(3)}


def compiled(**options) -> keras.Model:
    model = two_heads()
    model.compile(keras.optimizers.SGD(LEARNING_RATE), **options)
    return model


def assert_weights_equal(model: keras.Model, expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_a_compiled_model_brings_its_arguments():
    data = heads_data()
    history, _, expected = fit(two_heads, data, EXAMPLES, **TWO_HEADS)
    source = inputs.from_arrays(*data)
    trainer = tfpar.Trainer(compiled(**TWO_HEADS), **OPTIONS)
    logs = keras.callbacks.History()
    summary = trainer.fit(source, steps=1, validation=source, callbacks=[logs])
    assert_weights_equal(trainer.model, expected)
    found = {name: values[-1] for name, values in logs.history.items()}
    assert {name: found[name] for name in history} == pytest.approx(history, rel=2e-5)
    assert trainer.config.optimizer.optimizer == "custom"
    plain = two_heads()
    plain.compile(**TWO_HEADS)
    plain.set_weights(expected)
    evaluation = plain.evaluate(*data, batch_size=EXAMPLES, verbose=0, return_dict=True)
    assert trainer.evaluate(source) == pytest.approx({"examples": EXAMPLES} | evaluation, rel=2e-5)
    assert summary["eval"]["loss"] == pytest.approx(evaluation["loss"], rel=2e-5)


def test_arguments_win_over_those_of_compile():
    trainer = tfpar.Trainer(
        compiled(**TWO_HEADS), "adam", {"size": "mae", "kind": sparse()}, {"size": ["mse"]}, **OPTIONS
    )
    assert trainer.config.optimizer.optimizer == "adam"
    found = trainer.evaluate(inputs.from_arrays(*heads_data()))
    assert set(found) == {"loss", "examples", "size_loss", "kind_loss", "size_mse"}
    assert found["loss"] == pytest.approx(found["size_loss"] + found["kind_loss"], rel=1e-5)  # without loss_weights


def test_a_function_that_returns_a_compiled_model_is_told_to_pass_it():
    trainer = tfpar.Trainer(lambda: compiled(**TWO_HEADS), "sgd", **OPTIONS)
    with pytest.raises(ConfigError, match="Trainer\\(model\\), not a function"):
        trainer.evaluate(inputs.from_arrays(*heads_data()))


def test_sample_weights_and_masks_of_a_source():
    y, sample_weight = {"tag": classes(4, 6), "kind": classes(3, seed=12)}, {"tag": weights(6), "kind": weights()}
    options = {"loss": {"tag": sparse(), "kind": sparse()}, "weighted_metrics": {"tag": ["accuracy"]}}
    history, evaluation, expected = fit(two_tasks, (tokens(), y, sample_weight), EXAMPLES, **options)
    source = inputs.from_arrays(tokens(), y, sample_weight=sample_weight)
    micro_batches = {"accumulate_steps": 2, "uneven_batches": True}
    trainer = tfpar.Trainer(two_tasks, keras.optimizers.SGD(LEARNING_RATE), **options, **micro_batches, **OPTIONS)
    assert trainer.evaluate(source) == pytest.approx({"examples": EXAMPLES} | evaluation, rel=2e-5)
    summary = trainer.fit(source, steps=1)
    assert summary["train_loss"] == pytest.approx(history["loss"], rel=2e-5)
    assert_weights_equal(trainer.model, expected)


def test_loss_weighting_is_an_option():
    source = inputs.from_arrays(tokens(), classes(4, 6))
    losses = {
        choice: tfpar.Trainer(recurrent, "sgd", sparse(), loss_weighting=choice, **OPTIONS).evaluate(source)["loss"]
        for choice in ("positions", "examples")
    }
    assert abs(losses["positions"] - losses["examples"]) > 1e-4


def test_inputs_under_other_keys_are_refused():
    """The shapes alone would fit."""
    first, second = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"a": first, "b": second}, keras.layers.Dense(3)(keras.layers.Add()([first, second])))
    trainer = tfpar.Trainer(model, "sgd", sparse(), **OPTIONS | {"strategy": "one_device", "devices": 1})
    with pytest.raises(ConfigError, match=r"cannot be called on examples of {'a'.*Missing data for input .b"):
        trainer.fit({"a": floats(4), "c": floats(4)}, classes(3), steps=1)


def test_what_does_not_suit_the_labels_is_refused_before_the_first_step():
    def trainer(loss, metrics=None) -> tfpar.Trainer:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        return tfpar.Trainer(model, "sgd", loss, metrics, **OPTIONS | {"strategy": "one_device", "devices": 1})

    one_hot = inputs.from_arrays(floats(4), keras.utils.to_categorical(classes(3), 3).astype(np.int32))
    with pytest.raises(ConfigError, match="One-hot labels go with 'categorical_crossentropy'"):
        trainer(sparse()).fit(one_hot, steps=1)
    with pytest.raises(ConfigError, match="'f1_score' does not suit labels int32"):
        trainer(sparse(), [keras.metrics.F1Score()]).fit(inputs.from_arrays(floats(4), classes(3)), steps=1)
    with pytest.raises(ConfigError, match=r"cannot be called on examples of float32\[5\]: .*expected axis -1"):
        trainer(sparse()).fit(inputs.from_arrays(floats(5), classes(3)), steps=1)
    metric = keras.metrics.SparseCategoricalAccuracy(name="shared")
    with pytest.raises(ConfigError, match="metrics: the object 'shared' is given twice"):
        trainer(sparse(), {"a": [metric], "b": [metric]})
    with pytest.raises(ConfigError, match="is a dict by output name, but the model has one output without a name"):
        trainer({"a": "mse"}).fit(inputs.from_arrays(floats(4), classes(3)), steps=1)
    x = keras.Input((4,))
    two = keras.Model(x, {"left": keras.layers.Dense(1)(x), "right": keras.layers.Dense(1)(x)})
    named = tfpar.Trainer(
        two, "sgd", {"left": "mse", "rihgt": "mse"}, **OPTIONS | {"strategy": "one_device", "devices": 1}
    )
    with pytest.raises(ConfigError, match=r"loss: 'rihgt' is not an output of the model. Its outputs are: .*'right'"):
        named.fit(inputs.from_arrays(floats(4), {"left": floats(1), "right": floats(1)}), steps=1)


def test_a_loss_that_ignores_a_class_says_so_for_the_data():
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    y = np.array([0, 1, -1, 2] * 3, np.int32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    results = []
    for given in ((x, y), (tfpar.inputs.from_arrays(x, y, ignore_class=-1), None)):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        trainer = tfpar.Trainer(model, "sgd", loss, strategy="one_device", global_batch_size=4, jit_compile="false")
        trainer.fit(*given, epochs=1)
        results.append(trainer.evaluate(*given)["loss"])
    assert results[0] == results[1]


def test_several_tuples_are_evaluated_by_name():
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trainer = tfpar.Trainer(model, "sgd", "mse", strategy="one_device", global_batch_size=4, jit_compile="false")
    found = trainer.evaluate({"all": (x, x[:, :1]), "half": (x[:6], x[:6, :1])})
    assert found["half"] == trainer.evaluate(x[:6], x[:6, :1])
    assert found["all"]["examples"] == 12


def test_a_refused_trainer_leaves_the_dtype_policy():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ConfigError, match="the model was built to compute in float32"):
        tfpar.Trainer(model, "sgd", "mse", strategy="one_device", precision="mixed_bfloat16")
    assert keras.config.dtype_policy().name == "float32"


class Adding(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


@pytest.mark.parametrize(
    ("make", "batch", "warned"),
    [
        (lambda: keras.layers.Dense(4, activity_regularizer="l2"), 4, True),
        (lambda: keras.layers.Dense(4, activity_regularizer="l2"), 10, False),
        (Adding, 4, True),
        (lambda: keras.layers.Dense(4, kernel_regularizer="l2"), 4, False),
    ],
)
def test_an_added_loss_that_sees_padding_is_warned_of(caplog, make, batch, warned):
    x = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    model = keras.Sequential([keras.Input((4,)), make(), keras.layers.Dense(1)])
    options = {"strategy": "one_device", "global_batch_size": batch, "accumulate_steps": 2, "jit_compile": "false"}
    trainer = tfpar.Trainer(model, "sgd", "mse", **options)
    trainer.fit(x, x[:, :1], epochs=1)
    assert ("includes the padding of incomplete batches" in caplog.text) is warned


@pytest.mark.parametrize("data", [lambda: None, (part for part in "abc")], ids=["function", "generator"])
def test_functions_and_generators_are_shown_the_way(data):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trainer = tfpar.Trainer(model, "sgd", "mse", strategy="one_device")
    with pytest.raises(
        ConfigError,
        match=r"InputContext, and return a tf\.data\.Dataset\. A generator can be read only once: .*from_gen",
    ):
        trainer.fit(data, epochs=1)
    with pytest.raises(ConfigError, match=r"dataset: the function returned NoneType, but must return a tf\.data"):
        trainer.fit(lambda context: None, epochs=1)

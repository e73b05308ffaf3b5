"""What XLA cannot compile trains without it as in Keras' `fit`, and is refused by name where it was asked for."""

from __future__ import annotations

import math
import re

import tfpar
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest
import tensorflow as tf

WORDS = np.array([["a"], ["b"], ["c"], ["b"]] * 8)
LABELS = np.array([0, 1, 2, 1] * 8)


def of_strings() -> keras.Model:
    keras.utils.set_random_seed(3)
    words = keras.Input((1,), dtype="string")
    rows = keras.layers.Embedding(5, 4)(keras.layers.StringLookup(vocabulary=["a", "b", "c"])(words))
    return keras.Model(words, keras.layers.Dense(3, activation="softmax")(keras.layers.Flatten()(rows)))


class Subclassed(keras.Model):
    """Looks strings up in its call."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = of_strings().layers[1:]

    def call(self, x):
        for layer in self.parts:
            x = layer(x)
        return x


def of_numbers() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(3, activation="softmax")])


def trainer_of(model, **options) -> tfpar.Trainer:
    return tfpar.Trainer(
        model,
        keras.optimizers.SGD(0.1),
        loss="sparse_categorical_crossentropy",
        global_batch_size=len(WORDS),
        verbose=0,
        **options,
    )


@pytest.mark.xla
def test_a_model_of_strings_trains_as_in_keras():
    plain, model = of_strings(), of_strings()
    plain.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    plain.fit(tf.data.Dataset.from_tensors((WORDS, LABELS)), epochs=2, verbose=0)
    trainer = trainer_of(model)
    trainer.fit(WORDS, LABELS, epochs=2)
    assert not trainer.jit_compile
    for one, other in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
    assert trainer.predict(WORDS[:5]).shape == (5, 3)


@pytest.mark.xla
def test_layers_that_look_up_strings_need_no_graph():
    model = Subclassed()
    model(WORDS)
    assert trainer_of(model).fit(WORDS, LABELS, epochs=1)["steps"] == 1


@pytest.mark.xla
def test_xla_is_refused_with_the_layers():
    def of_integers() -> keras.Model:
        lookup = keras.layers.IntegerLookup(vocabulary=[3, 5], name="numbers")
        return keras.Sequential([keras.Input((1,), dtype="int64"), lookup, keras.layers.Embedding(4, 3)])

    assert not trainer_of(of_integers).jit_compile
    with pytest.raises(ConfigError, match="--jit_compile=true: XLA has no kernels for the layers numbers of"):
        _ = trainer_of(of_integers, jit_compile=True).jit_compile
    with pytest.raises(ConfigError, match="--jit_compile=true: the model reads strings"):
        _ = trainer_of(of_strings, jit_compile=True).jit_compile


def test_strings_for_a_model_of_numbers_are_refused_by_every_method():
    trainer, x = trainer_of(of_numbers()), np.zeros([32, 1], np.float32)
    with pytest.raises(ConfigError, match="it has no input of strings"):
        trainer.fit(WORDS, LABELS, epochs=1)
    trainer.fit(x, LABELS, epochs=1)
    with pytest.raises(ConfigError, match="it has no input of strings"):
        trainer.predict(WORDS)
    with pytest.raises(ConfigError, match=r"cannot be called on examples of float32\[2\]"):
        trainer.evaluate(np.zeros([32, 2], np.float32), LABELS)
    with pytest.raises(ConfigError, match=r"cannot be called on examples of float32\[2\]"):
        trainer.predict(np.zeros([32, 2], np.float32))


def addresses(variables) -> list[int]:
    """Where the values of the copies of variables lie in memory."""
    copies = [copy for variable in variables for copy in getattr(variable.value, "values", [variable.value])]
    return [np.asarray(memoryview(copy.read_value())).__array_interface__["data"][0] for copy in copies]


def wide() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(64), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((1,)), *layers])


def trained(**options) -> tfpar.Trainer:
    """Trains for two steps."""
    trainer = tfpar.Trainer(
        *(wide, keras.optimizers.AdamW(0.01)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **{"global_batch_size": 32, "verbose": 1, "steps_per_loop": 3, "devices": 2, **options},
    )
    trainer.fit(X, LABELS, steps=2)
    return trainer


X = np.linspace(-1.0, 1.0, 32, dtype=np.float32)[:, None]


@pytest.mark.xla
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "mirrored", "jit_compile": True},
        pytest.param({"strategy": "mirrored", "shard": "optimizer", "jit_compile": True}, marks=pytest.mark.proof),
        pytest.param({"strategy": "mirrored", "shard": "gradients"}, marks=pytest.mark.proof),
        pytest.param({"strategy": "mirrored", "shard": "weights"}, marks=pytest.mark.proof),
        {"mesh": "data:2,model:2", "devices": 4},
    ],
)
def test_a_program_updates_the_variables_of_each_device_in_place(options):
    """New values in other memory would need as much as weights and state."""
    trainer = trained(**options)
    assert trainer.program.compiles_update
    share = trainer.program.share
    least = 1024 if share else 64  # the state of smaller weights, which have no owner, may be on another device
    owners = share.replicas if share else [trainer.program]
    variables = [variable for owner in owners for variable in owner.optimizer.variables]
    state = [variable for variable in variables if math.prod(variable.shape) >= least]
    before = addresses(state)
    for steps in (3, 6):  # one step more, and three, which are one call
        trainer.fit(X, LABELS, steps=steps)
        assert addresses(state) == before
    assert len(state) >= 4
    alone = trained(strategy="one_device", devices=1, jit_compile=False)
    for steps in (3, 6):
        alone.fit(X, LABELS, steps=steps)
    for one, other in zip(trainer.model.weights, alone.model.weights, strict=True):
        whole = trainer.program.first_copies([one])[0]
        np.testing.assert_allclose(whole, other.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (of_numbers, {"strategy": "mirrored"}, r"XLA on$"),
        (of_numbers, {"strategy": "mirrored", "jit_compile": False}, r"XLA off$"),
        (
            of_numbers,
            {"strategy": "mirrored", "shard": "weights"},
            r"XLA in the optimizer step alone \(--shard=",
        ),
        (wide, {"mesh": "pipeline:2"}, r"XLA on, except for the optimizer step$"),
        (of_strings, {"strategy": "mirrored"}, r"XLA in the optimizer step alone \(the model reads strings"),
    ],
)
def test_a_run_says_what_is_compiled(model, options, said, messages):
    trainer = tfpar.Trainer(
        *(model, keras.optimizers.SGD(0.1)),
        loss="sparse_categorical_crossentropy",
        **{"devices": 2, "global_batch_size": 32, "verbose": 1, **options},
    )
    trainer.fit(WORDS if model is of_strings else X, LABELS, steps=1)
    assert any(re.search(f"step: float32, {said}", line) for line in messages), messages

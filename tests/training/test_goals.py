"""What `fit` computes on one process is what the step computes on any number of replicas, for any goal."""

from __future__ import annotations

from tests.training.goals import Training, fit
from tfpar.training.objective import Goal

import keras
import numpy as np
import pytest
import tensorflow as tf

EXAMPLES = 22
BATCH = 11  # two replicas with two micro-batches each pad it to 12

# Replicas, micro-batches, XLA. How sums travel hardly depends on the goal, so most goals run on two replicas only.
MIRRORED, XLA = (2, 2, False), (1, 2, True)
layouts = pytest.mark.parametrize("layout", [MIRRORED, XLA], ids=["mirrored", "xla"])


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(EXAMPLES, *shape)).astype(np.float32)


def classes(count: int, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (EXAMPLES, *shape)).astype(np.int32)


def tokens(seed: int = 2) -> np.ndarray:
    """Sequences of 1 to 6 tokens, padded with 0."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 7, EXAMPLES)
    return np.where(np.arange(6) < lengths[:, None], draws.integers(1, 9, (EXAMPLES, 6)), 0).astype(np.int32)


def check(build, data, layout, *, goal=None, batch=BATCH, **compile_options) -> None:
    """Compares an epoch and an evaluation with `fit` on one process."""
    replicas, accumulate_steps, jit_compile = layout
    history, evaluation, weights = fit(build, data, batch, **compile_options)
    goal = goal or Goal(**compile_options)
    training = Training(build, goal, data, replicas, jit_compile=jit_compile)
    assert training.evaluate(8) == pytest.approx(evaluation, rel=2e-5, abs=2e-6)
    assert training.train(batch, accumulate_steps) == pytest.approx(history, rel=2e-5, abs=2e-6)
    for ours, theirs in zip(training.weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def seeded(seed: int = 5) -> keras.initializers.Initializer:
    return keras.initializers.GlorotUniform(seed=seed)


def two_heads() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh", kernel_initializer=seeded())(inputs)
    size = keras.layers.Dense(2, kernel_initializer=seeded(6), name="size")(hidden)
    kind = keras.layers.Dense(3, activation="softmax", kernel_initializer=seeded(7), name="kind")(hidden)
    return keras.Model(inputs, {"size": size, "kind": kind})


TWO_HEADS = {
    "loss": {"size": "mse", "kind": "sparse_categorical_crossentropy"},
    "loss_weights": {"size": 0.5, "kind": 2.0},
    "metrics": {"size": ["mae", "mse"], "kind": ["accuracy"]},
}


@layouts
def test_two_heads_by_name(layout):
    data = floats(4), {"size": floats(2, seed=8), "kind": classes(3)}
    check(two_heads, data, layout, **TWO_HEADS)


def test_losses_in_a_list_and_an_output_without_a_loss():
    def build():
        model = two_heads()
        return keras.Model(model.inputs, [model.output["size"], model.output["kind"]])

    data = floats(4), (floats(2, seed=8), classes(3))
    options = {"loss": ["mse", None], "metrics": [["mae"], ["accuracy"]], "loss_weights": [0.5, 1.0]}
    check(build, data, MIRRORED, **options)


def test_a_last_batch_of_another_size_counts_by_its_examples():
    data = floats(4), {"size": floats(2, seed=8), "kind": classes(3)}
    options = TWO_HEADS | {"metrics": None}
    history, _, weights = fit(two_heads, data, 8, **options)
    training = Training(two_heads, Goal(**options), data, 2)
    assert training.train(8, 2)["loss"] == pytest.approx(history["loss"], rel=2e-5)
    for ours, theirs in zip(training.weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_nested_outputs():
    def build():
        model = two_heads()
        return keras.Model(model.inputs, {"a": (model.output["size"], model.output["kind"]), "b": model.output["size"]})

    data = floats(4), {"a": (floats(2, seed=8), classes(3)), "b": floats(2, seed=9)}
    options = {
        "loss": {"a": ("mse", "sparse_categorical_crossentropy"), "b": "mae"},
        "metrics": {"a": (["mae"], ["accuracy"]), "b": ["mse"]},
    }
    check(build, data, MIRRORED, **options)


@keras.saving.register_keras_serializable("goals")
class Pair(keras.Model):
    """A subclassed model of two outputs: nothing of them is known before it is called."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3, kernel_initializer=seeded())
        self.second = keras.layers.Dense(1, kernel_initializer=seeded(6))

    def call(self, x, training=False):
        return self.first(x["left"]), self.second(x["right"])


def pair() -> keras.Model:
    model = Pair()
    model({"left": tf.zeros([1, 4]), "right": tf.zeros([1, 3])})
    return model


def test_a_subclassed_model_of_dict_inputs():
    data = {"left": floats(4), "right": floats(3, seed=4)}, (floats(3, seed=8), floats(1, seed=9))
    options = {"loss": ["mse", "mae"], "metrics": [["mae"], ["mse"]]}
    check(pair, data, MIRRORED, **options)


@keras.saving.register_keras_serializable("goals")
class Closeness(keras.layers.Layer):
    """Adds how far its two inputs are apart, a mean over the batch."""

    def call(self, pair):
        one, other = pair
        self.add_loss(keras.ops.mean(keras.ops.square(one - other)))
        return other


def autoencoder() -> keras.Model:
    inputs = keras.Input((4,))
    code = keras.layers.Dense(2, kernel_initializer=seeded(), kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    decoded = keras.layers.Dense(4, kernel_initializer=seeded(6))(code)
    return keras.Model(inputs, Closeness()([inputs, decoded]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_without_labels_that_adds_its_loss(replicas):
    # Equal shares without padding: what a model adds is a mean over its own batch.
    options = {"loss": None}
    history, evaluation, weights = fit(autoencoder, (floats(4),), 2, **options)
    training = Training(autoencoder, Goal(**options), (floats(4),), replicas)
    assert training.evaluate(22) == pytest.approx(evaluation, rel=2e-5)
    assert training.train(2) == pytest.approx(history, rel=2e-5)
    for ours, theirs in zip(training.weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_inputs_as_labels():
    def build():
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(4, kernel_initializer=seeded())(inputs))

    x = floats(4)
    check(build, (x, x), MIRRORED, loss="mse", metrics=[keras.metrics.R2Score()])

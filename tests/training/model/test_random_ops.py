"""TensorFlow's own random operations: refused where one replica would compute with different numbers."""

from __future__ import annotations

import tfpar
from tfpar.config import ConfigError
from tfpar.training.model.random_ops import first_draw

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers
FEATURES = 64


class Drawing(layers.Dense):
    def call(self, x):
        return super().call(x) * tf.random.uniform([])


class Generated(layers.Dense):
    """Draws from a generator that has a variable."""

    def __init__(self, units):
        super().__init__(units)
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return super().call(x) * self.generator.uniform([])


def model_with(layer: layers.Layer) -> keras.Model:
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(FEATURES), layer, layers.Dense(FEATURES), layers.Dense(2)]
    )


def fit(layer, **options) -> None:
    x = np.ones((8, FEATURES), np.float32)
    options = {"strategy": "one_device", "global_batch_size": 8, "jit_compile": "false", **options}
    trainer = tfpar.Trainer(
        lambda: model_with(layer(FEATURES)), keras.optimizers.SGD(0.1), "mse", exchange="none", **options
    )
    trainer.fit(x, x[:, :2], steps=1)


@pytest.mark.parametrize("layer", [Drawing, Generated])
def test_a_block_that_is_computed_again_must_draw_the_same(layer):
    with pytest.raises(ConfigError, match=r"(?s)--recompute.*random numbers by TensorFlow.*SeedGenerator"):
        fit(layer, recompute="drawing|generated")
    fit(layer, recompute="dense")


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"mesh": "model:2"}, "on each device of the model axis"),
        ({"mesh": "pipeline:2", "recompute": "blocks"}, r"stage [01].*in the backward pass"),
        ({"shard": "weights"}, "a block of --shard=weights"),
    ],
)
def test_devices_and_passes_must_draw_the_same(options, where):
    with pytest.raises(ConfigError, match=f"(?s){where}"):
        fit(Drawing, strategy="mirrored", devices=2, **options)


def test_a_pipeline_may_draw():
    fit(Drawing, strategy="mirrored", devices=2, mesh="pipeline:2")


def test_functions_that_are_called_are_searched():
    def body(i, x):
        return i + 1, x * tf.random.normal([])

    @tf.function
    def inner(x):
        return tf.while_loop(lambda i, x: i < 3, body, (0, x))[1]

    def operations(function):
        return tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([])).graph.get_operations()

    found = first_draw(operations(lambda x: tf.cond(x > 0, lambda: inner(x), lambda: x)))
    assert found is not None
    assert found.type == "RandomStandardNormal"
    assert first_draw(operations(lambda x: x * keras.random.normal([], seed=1))) is None

"""Graphs whose operations have gradients of their own end with the objects that use them."""

from __future__ import annotations

import gc
import weakref

from tests.training.trainers import source, trainer_of
from tfpar.parallel.traced_gradients import graphs_released

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops


@tf.custom_gradient
def doubled(x: tf.Tensor):
    return 2.0 * x, lambda upstream: 3.0 * upstream  # another number, to tell it from TensorFlow's own


def test_a_function_can_still_be_differentiated_and_then_ends():
    function = tf.function(doubled, autograph=False)
    with graphs_released():
        graph = function.get_concrete_function(tf.TensorSpec([])).graph
    x = tf.constant(5.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    assert (y, tape.gradient(y, x)) == (10.0, 3.0)
    with graphs_released():
        pass
    ended = weakref.ref(graph)
    del function, graph, tape
    gc.collect()
    assert ended() is None


def test_another_thread_may_register_and_remove_gradients_at_the_same_time():
    registered = ops.gradient_registry._registry

    class Name(str):
        """Changes the registry when it is looked at, as another thread may."""

        def startswith(self, prefix):
            registered[f"{self}-of-another-thread"] = registered.pop(self, None)
            return False

    registered[Name("tfpar-test")] = {}
    try:
        with graphs_released():
            pass
    finally:
        assert registered.pop("tfpar-test-of-another-thread") == {}


def dense() -> keras.Model:
    layers = [keras.layers.Dense(8, activation=activation) for activation in ("relu", "silu", "tanh")]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


@pytest.mark.parametrize("options", [{"mesh": "model:2"}, {"mesh": "pipeline:2"}, {"recompute": "blocks"}])
def test_a_trainer_ends_with_its_model(options):
    trainer = trainer_of(dense, devices=2 if "mesh" in options else 1, strategy="auto", **options)
    trainer.fit(source(), steps=2, validation=source(11, 9))
    trainer.predict(source(11, 9))
    ended = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert ended() is None

"""Calling any model as a pure function: the numbers are those of Keras' own `fit`."""

from __future__ import annotations

from tests.training.harness import Steps, squared_error
from tests.training.model import keras_steps
from tfpar.config import ConfigError
from tfpar.training.model.call import call_model, recording

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers
STEPS, BATCH = 3, 8


def data(features: int = 6):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(STEPS * BATCH, features)).astype(np.float32)
    return x, x[:, :1] * 2 - x[:, 1:2]


def steps(x, y, replicas: int, micro_batches: int):
    """The batches of the steps, cut for replicas and micro-batches; every example has weight 1."""
    shape = (STEPS, replicas, micro_batches, -1)
    x, y = (part.reshape(*shape, *part.shape[1:]) for part in (x, y))
    weight = np.ones(x.shape[:4], np.float32)
    return [[(x[i, j], y[i, j], weight[i, j]) for j in range(replicas)] for i in range(STEPS)]


def values(variables):
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def call(model, x, *, training):
    return call_model(
        model, values(model.trainable_variables), values(model.non_trainable_variables), x, training=training
    )


# Weights that the forward pass assigns


def spectral() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.SpectralNormalization(layers.Dense(5, activation="tanh")),
            layers.SpectralNormalization(layers.Dense(1), power_iterations=2),
        ]
    )


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "jit_compile"),
    [(1, 1, False), (1, 1, True), (1, 4, True), (1, 4, False), (2, 1, True), (2, 2, False)],
)
def test_weights_that_the_forward_pass_assigns_are_those_of_keras(replicas, micro_batches, jit_compile):
    x, y = data()
    reference = spectral()
    start = reference.get_weights()
    batches_of_steps = [
        [
            (x[first : first + BATCH // micro_batches], y[first : first + BATCH // micro_batches])
            for first in range(step * BATCH, (step + 1) * BATCH, BATCH // micro_batches)
        ]
        for step in range(STEPS)
    ]
    optimizer, loss = keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError()
    expected = keras_steps.accumulate(reference, optimizer, loss, batches_of_steps)

    def same() -> keras.Model:
        model = spectral()
        model.set_weights(start)
        return model

    run = Steps(replicas, same, jit_compile=jit_compile)
    batches = steps(x, y, 1, micro_batches)
    if replicas > 1:  # a micro-batch of every replica is the share of one of Keras' micro-batches
        batches = [
            [tuple(np.stack(np.split(part, replicas, axis=1))[replica] for part in batch[0]) for replica in (0, 1)]
            for batch in batches
        ]
    result = run.run(batches, micro_batches=True)
    np.testing.assert_allclose(result.loss, expected, rtol=2e-5)
    for ours, theirs in zip(run.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    # The kept weights are the normalised ones: evaluation computes with them.
    loss = np.mean(squared_error(y, run.model(x)))
    assert loss == pytest.approx(np.mean(squared_error(y, reference(x))), rel=1e-4)
    for one, other in zip(run.weights()[0], run.weights()[-1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_fit_itself_gives_these_numbers():
    x, y = data()
    reference = spectral()
    start = reference.get_weights()
    expected = keras_steps.fit(reference, keras.optimizers.SGD(0.1), "mse", x, y, BATCH)

    def same() -> keras.Model:
        model = spectral()
        model.set_weights(start)
        return model

    run = Steps(1, same)
    np.testing.assert_allclose(run.run(steps(x, y, 1, 1), micro_batches=True).loss, expected, rtol=2e-5)
    for ours, theirs in zip(run.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


class Standardised(layers.Layer):
    """Assigns to a trainable weight what depends on the batch."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x, training=False):
        if training:
            self.scale.assign(0.5 * self.scale + 0.5 * keras.ops.mean(x, axis=0))
        return x * self.scale


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_replicas_that_would_assign_other_weights_are_refused(micro_batches):
    x, y = data()
    batches = steps(x, y, 2, micro_batches)
    with pytest.raises(ConfigError, match=r"standardised/scale' a value that depends on the examples.*one_device"):
        Steps(2, lambda: keras.Sequential([keras.Input((6,)), Standardised(), layers.Dense(1)])).run(
            batches, micro_batches=True
        )


def test_one_replica_may_assign_what_depends_on_the_batch():
    x, y = data()
    build = lambda: keras.Sequential([keras.Input((6,)), Standardised(), layers.Dense(1)])  # noqa: E731
    reference = build()
    start = reference.get_weights()
    expected = keras_steps.fit(reference, keras.optimizers.SGD(0.1), "mse", x, y, BATCH)

    def same() -> keras.Model:
        model = build()
        model.set_weights(start)
        return model

    run = Steps(1, same)
    np.testing.assert_allclose(run.run(steps(x, y, 1, 1), micro_batches=True).loss, expected, rtol=1e-4)


def test_a_variable_assigned_inside_a_branch_is_refused_by_name():
    class Inside(layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

        def call(self, x):
            keras.ops.cond(keras.ops.sum(x) > 0, lambda: self.count.assign(self.count + 1), lambda: 0.0)
            return x

    model = keras.Sequential([keras.Input((6,)), Inside(), layers.Dense(1)])
    function = tf.function(lambda x: call(model, x, training=True).state, autograph=False)
    with pytest.raises(ConfigError, match=r"inside/count' inside a loop, a branch"):
        function(tf.ones([2, 6]))


def test_a_loss_added_inside_a_function_is_refused_by_name():
    class Inside(layers.Layer):
        @tf.function
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    # Without an input: a trace for any number of examples would be used again, and add nothing, in `fit` as well.
    model = keras.Sequential([Inside(name="inside"), layers.Dense(1)])
    model(np.ones([3, 6], np.float32))
    function = tf.function(lambda x: call(model, x, training=True).losses, autograph=False)
    with pytest.raises(ConfigError, match=r"layer 'inside' adds a loss .*a call needs no tf.function"):
        function(tf.ones([2, 6]))


# How a model is called


def test_a_model_whose_call_has_no_training_is_called_as_fit_calls_it():
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1, kernel_initializer="ones")
            self.drop = layers.Dropout(0.5)

        def call(self, x):
            return self.drop(self.dense(x))

    model = Plain()
    model(np.zeros((1, 6), np.float32))
    x, y = data()
    run = Steps(1, lambda: model, jit_compile=False)
    loss = run.run(steps(x, y, 1, 1)[:1], micro_batches=True).loss[0]
    np.testing.assert_allclose(loss, np.mean((x[:BATCH].sum(1, keepdims=True) - y[:BATCH]) ** 2), rtol=1e-5)


def test_nested_layers_learn_from_the_model_that_it_is_training():
    """Keras hands `training` on to layers that are called without it."""

    class Silent(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop = layers.Dropout(0.5)
            self.dense = layers.Dense(1)

        def call(self, x, training=None):
            return self.dense(self.drop(x)), self.drop(x)

    model = Silent()
    model(np.zeros((1, 6), np.float32))
    ones = tf.ones([4, 6])
    assert np.any(call(model, ones, training=True).outputs[1] == 0)
    assert not np.any(call(model, ones, training=False).outputs[1] == 0)


def test_a_mask_reaches_a_model_that_takes_one():
    class Pooled(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = layers.Embedding(9, 4, mask_zero=True)
            self.pool = layers.GlobalAveragePooling1D()

        def call(self, x, mask=None):
            return self.pool(self.embed(x))

    model = Pooled()
    tokens = np.array([[1, 2, 0, 0], [3, 4, 5, 0]], np.int32)
    expected = model(tokens)
    np.testing.assert_array_equal(call(model, tf.constant(tokens), training=True).outputs, expected)

    inputs = keras.Input((4,), dtype="int32")
    outer = keras.Sequential([inputs, layers.Embedding(9, 4, mask_zero=True), layers.GlobalAveragePooling1D()])
    np.testing.assert_array_equal(call(outer, tf.constant(tokens), training=False).outputs, outer(tokens))


def test_a_model_with_weights_of_its_own_computes_in_its_policy():
    class Scaled(keras.Model):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return x * self.scale

    model = Scaled(dtype="mixed_bfloat16")
    x = np.ones((2, 3), np.float32)
    assert model(x).dtype == "bfloat16"
    assert call(model, tf.constant(x), training=True).outputs.dtype == "bfloat16"


def test_losses_are_those_of_the_last_call():
    class Noted(layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    model = keras.Sequential([keras.Input((2,)), Noted(), layers.Dense(1, kernel_regularizer="l2")])
    for _ in range(2):
        losses = call(model, tf.ones([3, 2]), training=True).losses
        assert len(losses) == 2
        assert float(losses[0]) == 6.0


class Pulled(layers.Layer):
    """Adds a Keras loss object's value, which Keras divides by the number of replicas."""

    def call(self, x):
        self.add_loss(keras.losses.MeanSquaredError()(keras.ops.zeros_like(x), x))
        return x


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_object_in_the_forward_pass_counts_once_on_any_number_of_replicas(replicas):
    x, y = data()

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dense(3, kernel_initializer="ones"), Pulled(), Last()])

    expected = keras_steps.fit(build(), keras.optimizers.SGD(0.01), "mse", x, y, BATCH)
    run = Steps(replicas, build, lambda: keras.optimizers.SGD(0.01), jit_compile=False)
    np.testing.assert_allclose(run.run(steps(x, y, replicas, 1), micro_batches=True).loss, expected, rtol=1e-4)


class Last(layers.Layer):
    def call(self, x):
        return keras.ops.sum(x, axis=-1, keepdims=True)


def test_recording_counts_what_a_call_adds_to_the_models_metrics():
    class Counting(layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="activity")

        def call(self, x):
            self.mean.update_state(x)
            return x

    model = keras.Sequential([keras.Input((2,)), Counting(), layers.Dense(1)])
    metric = model.layers[0].mean
    metric.reset_state()
    with recording(metrics=[metric]) as record:
        call(model, tf.fill([3, 2], 0.5), training=True)
        call(model, tf.fill([3, 2], 1.5), training=True)
    assert [float(value) for value in record.metric_sums] == [6.0, 6.0]  # of the means of six examples
    assert float(metric.total.numpy()) == 0.0

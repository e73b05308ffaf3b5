"""The optimizer of the drop-in, as Keras and the loop of a script see it."""

from __future__ import annotations

import json
import zipfile

import tfpar
from tests.drop_in.alone import X, Y, model_of
from tfpar.drop_in.optimizer import distribution_of

import keras
import numpy as np
import pytest
import tensorflow as tf


def test_keras_sees_the_optimizer_that_it_knows(alone):
    adam = tfpar.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=1.0), exchange="int4")
    assert isinstance(adam, keras.optimizers.Adam)
    assert distribution_of(adam) is not None
    assert keras.optimizers.get(adam) is adam
    plain = keras.optimizers.Adam(0.01, clipnorm=1.0, name=adam.name)
    assert keras.optimizers.serialize(adam) == keras.optimizers.serialize(plain)
    assert type(adam).from_config(adam.get_config()).get_config() == plain.get_config()
    adam.learning_rate = 0.5
    assert float(adam.learning_rate) == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 20)),
        lambda: keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=3),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ],
)
def test_saved_it_loads_as_the_plain_optimizer_and_goes_on(alone, tmp_path, make):
    def train(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = model_of()
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        return model

    plain, distributed = train(make()), train(tfpar.DistributedOptimizer(make()))
    for name, model in (("plain", plain), ("distributed", distributed)):
        model.save(tmp_path / f"{name}.keras")
    configs = [zipfile.ZipFile(tmp_path / f"{name}.keras").read("config.json") for name in ("plain", "distributed")]
    assert json.loads(configs[0])["compile_config"] == json.loads(configs[1])["compile_config"]
    loaded = keras.models.load_model(tmp_path / "distributed.keras")
    assert type(loaded.optimizer) is type(plain.optimizer)
    for ours, theirs in zip(loaded.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    # A loaded optimizer, with its state, is distributed in its place.
    assert tfpar.DistributedOptimizer(loaded.optimizer) is loaded.optimizer
    for model in (plain, loaded):
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    for ours, theirs in zip(loaded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_variables_that_it_was_not_built_with_are_refused_by_name(alone):
    sgd = tfpar.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="the optimizer must already be built"):
        sgd.apply([tf.ones(1)])
    first, second = (keras.Variable([1.0], name=name) for name in ("first", "second"))
    sgd.apply([tf.ones(1)], [first])
    with pytest.raises(tfpar.ConfigError, match=r"SGD was built without the variable second: .* Wrap a new one"):
        sgd.apply([tf.ones(1)], [second])


def test_it_works_in_a_loop_of_ones_own(alone):
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    sgd = tfpar.DistributedOptimizer(keras.optimizers.SGD(1.0))

    @tf.function
    def step() -> None:
        sgd.apply([None, tf.constant([0.5])], variables)

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        step()
    np.testing.assert_array_equal(variables[0].numpy(), [1.0, 2.0])
    np.testing.assert_array_equal(variables[1].numpy(), [2.5])


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(1.0, momentum=0.5),
        lambda: keras.optimizers.SGD(1.0, momentum=0.5, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), initial_scale=1.0),
    ],
)
def test_a_variable_is_updated_if_any_worker_has_a_gradient(alone, make):
    """Otherwise its weights would differ from then on: the others would not apply the mean."""
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0]), keras.Variable([4.0])]
    sgd = tfpar.DistributedOptimizer(make())
    alone.others.append(lambda value: [[], [0, 1]] if value == [[], [1]] else value)  # a gradient of the first one, too
    sgd.build(variables)
    momenta = [*getattr(sgd, "inner_optimizer", sgd).momentums]
    for momentum in momenta:
        momentum.assign(-keras.ops.ones_like(momentum))
    for _ in range(sgd.gradient_accumulation_steps or 1):
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            sgd.apply([None, tf.constant([0.5]), None], variables)
    first, second, third = (variable.numpy().tolist() for variable in variables)
    assert (first, second, third) == ([0.5, 1.5], [2.0], [4.0])


def test_repeated_rows_of_a_sparse_gradient_add_up(alone):
    """Keras 3.15 alone squares each of the rows by itself for Adam's second moment."""
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([1, 1]), tf.constant([3, 1]))
    found = []
    for gradient in (rows, tf.constant([[0.0], [3.0], [0.0]])):
        variable = keras.Variable(np.ones((3, 1), np.float32))
        adam = tfpar.DistributedOptimizer(keras.optimizers.Adam(0.1))
        adam.apply([gradient], [variable])
        found.append([value.numpy() for value in adam.variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """Cannot be serialised."""

    def __call__(self, step):
        return 0.5 ** tf.cast(step, tf.float32)


@pytest.mark.parametrize(("rate", "name"), [(Halving(), "Halving"), (lambda: 0.1, "<lambda>")])
@pytest.mark.parametrize("scaled", [False, True])
def test_rates_that_cannot_be_saved_are_compared_by_name(alone, rate, name, scaled):
    optimizer = keras.optimizers.SGD(rate)
    optimizer = tfpar.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)
    optimizer.build(model_of().trainable_variables)
    alone.others = [lambda value: [value[0] | {"learning_rate": "Doubling"}, value[1]]]
    with pytest.raises(tfpar.ConfigError, match=f"different values of learning_rate, 'Doubling' and '{name}'"):
        distribution_of(optimizer).start(optimizer)
    alone.others = [lambda value: value]
    distribution_of(optimizer).start(optimizer)


def test_gradients_and_rows_of_float16_weights_have_a_loss_scale(alone):
    """The scale and the means are float32 where the weights are float16."""
    table, dense = (keras.Variable(np.zeros([4, 2]), dtype="float16") for _ in range(2))
    inner = keras.optimizers.SGD(2.0**10)
    optimizer = tfpar.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0))
    scaled = tf.fill([1, 2], tf.constant(8.0 * 2.0**-10, tf.float16))
    rows = tf.IndexedSlices(scaled, tf.constant([1], tf.int64), tf.constant([4, 2], tf.int64))
    optimizer.apply([rows, tf.repeat(scaled, 4, axis=0)], [table, dense])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-1, -1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(dense.numpy(), -np.ones([4, 2]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_user_is_told_that_float64_gradients_are_rounded(alone, caplog, dtype):
    variable = keras.Variable(np.zeros(1), dtype=dtype)
    tfpar.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([tf.constant([1.0 + 2.0**-30], dtype)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-1.0])
    assert ("gradients of float64 variables travel as float32" in caplog.text) == (dtype == "float64")

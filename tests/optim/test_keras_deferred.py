"""Models whose variables get their values later, and the private names of Keras that this needs."""

from __future__ import annotations

import random
from collections.abc import Callable

from tfpar.optim.keras_deferred import INTERNALS, comes_from, is_deferred, made_deferred, value_on_host

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state


def dense() -> keras.Model:
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, keras.layers.Dense(2, kernel_initializer="orthogonal")])


def called() -> keras.Model:
    """On values, which change statistics; and a weight is set."""
    model = dense()
    model(np.ones([5, 3], np.float32), training=True)
    model.layers[0].bias.assign([1.0, 2.0, 3.0, 4.0])
    return model


def seeded(make: Callable[[], keras.Model]) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    return make()


def deferred(make: Callable[[], keras.Model]) -> keras.Model | None:
    return made_deferred(make, lambda model: model.variables)


@pytest.mark.parametrize("make", [dense, called])
def test_values_are_those_of_a_model_that_has_them_at_once(make):
    expected, found = seeded(make), seeded(lambda: deferred(make))
    assert [each.path for each in found.variables] == [each.path for each in expected.variables]
    assert is_deferred(found.layers[0].kernel)
    for variable, other in zip(found.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(value_on_host(variable), other.numpy(), err_msg=variable.path)


def test_a_function_that_fails_changes_nothing():
    def make() -> keras.Model:
        dense()
        raise KeyError("unknown")

    seeded(dense)
    names = dict(global_state.get_global_attribute("object_name_uids"))
    states = random.getstate(), np.random.get_state()[1].tolist()
    assert deferred(make) is None
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    assert dict(global_state.get_global_attribute("object_name_uids")) == names
    assert not is_deferred(dense().layers[0].kernel)


def test_a_function_may_assign_to_variables_that_exist():
    backbone, ones = dense(), np.ones([3, 4], np.float32)

    def make() -> keras.Model:
        backbone.layers[0].kernel.assign(ones)
        return keras.Sequential([keras.Input((3,)), backbone, keras.layers.Dense(1)])

    assert is_deferred(deferred(make).layers[1].kernel)
    np.testing.assert_array_equal(backbone.layers[0].kernel.numpy(), ones)


def test_a_function_whose_values_are_those_of_a_graph_fails():
    """And the generator of unseeded operations, made in the scope, does not stay without its state."""

    def make() -> keras.Model:
        model = dense()
        tf.function(model, autograph=False)(tf.ones([5, 3]), training=True)
        return model

    keras.utils.clear_session(free_memory=False)
    assert deferred(make) is None
    keras.random.normal([2])


def test_values_from_a_generator_are_drawn_at_once():
    """In the order in which the variables were made."""

    def make() -> keras.Model:
        seeds = keras.random.SeedGenerator(4)
        layers = [
            keras.layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(seed=seeds)),
            keras.layers.Dense(2, kernel_initializer=lambda shape, dtype: keras.random.normal(shape, dtype=dtype)),
        ]
        return keras.Sequential([keras.Input((3,)), *layers])

    expected, found = seeded(make), seeded(lambda: deferred(make))
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert not is_deferred(layer.kernel)
        assert is_deferred(layer.bias)
        np.testing.assert_array_equal(layer.kernel.numpy(), other.kernel.numpy())


def test_variables_that_are_not_the_models_have_values():
    """Those of an optimizer, for example, which Keras makes with values."""
    others: list[keras.Variable] = []

    def make() -> keras.Model:
        others.append(keras.Variable("ones", shape=(2,)))
        model = dense()
        model.compile(optimizer=keras.optimizers.Adam(0.25), loss="mse")
        return model

    model = deferred(make)
    assert is_deferred(model.layers[0].kernel)
    np.testing.assert_array_equal(others[0].numpy(), np.ones(2))
    assert float(model.optimizer.learning_rate.numpy()) == 0.25
    assert [int(model.optimizer.iterations.numpy()), model.optimizer.iterations.dtype] == [0, "int64"]
    assert not is_deferred(model.optimizer.iterations)


def test_a_value_may_come_from_elsewhere_once():
    variable = keras.Variable("ones", shape=(2,))
    comes_from(variable, lambda own: 2 * own.numpy())
    assert [value_on_host(variable).tolist() for _ in range(2)] == [[2.0, 2.0], [1.0, 1.0]]


def uninitialized_variables():
    with keras.StatelessScope():
        variable = keras.Variable("ones", shape=(2,))
        assert global_state.get_global_attribute("uninitialized_variables")[-1] is variable
    assert not global_state.get_global_attribute("uninitialized_variables")
    np.testing.assert_array_equal(variable.value, np.ones(2))


def object_name_uids():
    keras.utils.clear_session(free_memory=False)
    keras.layers.Dense(2)
    assert global_state.get_global_attribute("object_name_uids")["dense"] == 1


def global_seed_generator():
    keras.utils.clear_session(free_memory=False)
    keras.random.normal([2])
    assert isinstance(global_state.get_global_attribute("global_seed_generator"), keras.random.SeedGenerator)


def deferred_initialize():
    with keras.StatelessScope():
        variable = keras.Variable("ones", shape=(2,))
        global_state.get_global_attribute("uninitialized_variables").clear()
    assert variable._value is None
    assert callable(variable._initializer)
    np.testing.assert_array_equal(variable.numpy(), np.ones(2))
    variable._deferred_initialize()
    assert variable._value is not None
    assert variable._initializer is None


def init():
    variable = keras.Variable(np.ones(2, np.float32), None, "float64", trainable=False)
    assert (variable.dtype, variable.trainable) == ("float64", False)
    with keras.StatelessScope(), pytest.raises(ValueError, match="create a variable while in a stateless scope"):
        keras.Variable(np.ones(2))


CANARIES = {
    ("keras.src.backend.common.global_state", "uninitialized_variables"): uninitialized_variables,
    ("keras.src.backend.common.global_state", "object_name_uids"): object_name_uids,
    ("keras.src.backend.common.global_state", "global_seed_generator"): global_seed_generator,
    ("Variable", "__init__"): init,
    ("Variable", "_deferred_initialize"): deferred_initialize,
    ("Variable", "_initializer"): deferred_initialize,
}


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: f"{internal.owner}.{internal.name}")
def test_keras_still_has(internal):
    CANARIES[internal.owner, internal.name]()


def test_every_private_name_has_a_canary():
    assert [(row.owner, row.name) for row in INTERNALS] == list(CANARIES)

"""What a user of Keras' `fit` expects of the Trainer: the same numbers, in cases beside the main road."""

from __future__ import annotations

import tfpar

import keras
import numpy as np
import pytest

layers = keras.layers
EXAMPLES = 20


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])


def trainer(made=model, optimizer=None, loss="mse", replicas: int = 1, **options) -> tfpar.Trainer:
    devices = {"strategy": "mirrored", "devices": replicas} if replicas > 1 else {"strategy": "one_device"}
    options = {"global_batch_size": 8, "shuffle": False, "jit_compile": False, **devices, **options}
    return tfpar.Trainer(made, optimizer or keras.optimizers.SGD(0.05), loss, **options)


def reference(loss="mse", optimizer=None, made=model, **options) -> keras.Model:
    plain = made()
    plain.compile(optimizer or keras.optimizers.SGD(0.05), loss, jit_compile=False, **options)
    return plain


def assert_same(history, expected) -> None:
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_larger_than_the_data(replicas, messages):
    x, y = data()
    expected = reference().fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0).history
    assert_same(trainer(replicas=replicas, global_batch_size=64).fit(x, y, epochs=3).history, expected)
    assert "all examples, which are fewer than --global_batch_size=64" in "\n".join(messages)

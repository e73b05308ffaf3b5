"""What a user of Keras' `fit` expects of the Trainer: the same numbers, in cases beside the main road."""

from __future__ import annotations

import tfpar
from tfpar.config import ConfigError

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


def two_inputs() -> keras.Model:
    one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
    return keras.Model([one, other], layers.Dense(1)(layers.Concatenate()([one, other])))


def test_more_inputs_than_the_model_has_are_refused():
    x, y = data()
    message = r"has 1 input \('.*'\), but the examples have 2: .*labels in y"
    for made in (model, lambda: keras.Model(one := keras.Input((4,)), layers.Dense(1)(one))):
        for call in (lambda made: made.fit([x, x], y, steps=1), lambda made: made.evaluate([x, x], y)):
            with pytest.raises(ConfigError, match=message):
                call(trainer(made))
    with pytest.raises(ConfigError, match=r"has 2 inputs \('one', 'other'\), but the examples have 3"):
        trainer(two_inputs).fit([x, x, x], y, steps=1)
    assert trainer(two_inputs).fit([x, x], y, steps=1)["steps"] == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradient_accumulation_of_the_optimizer(replicas, messages):
    def accumulating() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5, gradient_accumulation_steps=2)

    x, y = data()
    plain = reference(optimizer=accumulating())
    expected = plain.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0).history
    given = accumulating()
    ours = trainer(optimizer=given, replicas=replicas, global_batch_size=10, uneven_batches=True)
    assert ours.config.train.accumulate_steps == given.gradient_accumulation_steps == 2
    assert any("taken as accumulate_steps=2" in line and "batch_size x 2" in line for line in messages)
    assert_same(ours.fit(x, y, epochs=3).history, expected)
    for one, other in zip(ours.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_two_numbers_of_micro_batches_contradict():
    accumulating = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="accumulate_steps=4 contradicts gradient_accumulation_steps=2"):
        trainer(optimizer=accumulating, accumulate_steps=4)


def test_accumulation_beside_a_schedule_or_with_state_is_refused_with_the_way_out():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    used = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    used.build(model().trainable_variables)
    for accumulating in (keras.optimizers.SGD(schedule, gradient_accumulation_steps=2), used):
        with pytest.raises(ConfigError, match=r"--accumulate_steps=2.*counts in micro-batches"):
            trainer(optimizer=accumulating)

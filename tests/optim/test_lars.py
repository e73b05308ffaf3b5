"""LARS against its paper."""

from __future__ import annotations

from tests.optim.updates import assert_close, gradients_of, run_pure, values_of
from tfpar.optim.lars import LARS

import keras
import numpy as np
import pytest
import tensorflow as tf


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_follows_algorithm_1(nesterov):
    """You et al. 2017 in plain numpy; the bias takes momentum SGD."""
    generator = np.random.default_rng(3)
    kernel, bias = generator.normal(size=(3, 4)).astype("float32"), generator.normal(size=4).astype("float32")
    variables = [keras.Variable(kernel, name="kernel"), keras.Variable(bias, name="bias")]
    optimizer = LARS(2.0, momentum=0.8, nesterov=nesterov, trust_coefficient=0.01, epsilon=0.0, weight_decay=0.05)
    optimizer.build(variables)
    gradients = gradients_of(variables)
    params, _ = run_pure(optimizer, values_of(variables), gradients)

    expected = []
    for index, (weight, decay) in enumerate([(kernel, 0.05), (bias, 0.0)]):
        velocity = np.zeros_like(weight)
        for step in gradients:
            gradient, norm = step[index].numpy(), np.linalg.norm
            trust = 0.01 * norm(weight) / (norm(gradient) + decay * norm(weight)) if decay else 1.0
            direction = 2.0 * trust * (gradient + decay * weight)
            velocity = 0.8 * velocity + direction
            weight = weight - (0.8 * velocity + direction if nesterov else velocity)
        expected.append(tf.constant(weight))
    assert_close(params, expected, rtol=1e-5)


def test_lars_step_does_not_depend_on_the_gradients_length():
    """What the trust ratio is for: the first step's length is rate x trust_coefficient x |w|."""
    value = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
    lengths = []
    for scale in (1e-3, 1.0, 1e3):
        variable = keras.Variable(value, name="kernel")
        optimizer = LARS(1.0, trust_coefficient=0.01)
        optimizer.build([variable])
        (new,), _ = run_pure(optimizer, values_of([variable]), [[tf.constant(scale * value[::-1].copy())]])
        lengths.append(np.linalg.norm(new - value))
    np.testing.assert_allclose(lengths, 0.01 * np.linalg.norm(value), rtol=1e-5)


def test_lars_starts_from_zero_weights():
    variable = keras.Variable(np.zeros((2, 2), "float32"), name="kernel")
    optimizer = LARS(0.1, momentum=0.0)
    optimizer.build([variable])
    (new,), _ = run_pure(optimizer, values_of([variable]), [[tf.ones([2, 2])]])
    np.testing.assert_allclose(new, -0.1 * np.ones((2, 2)), rtol=1e-6)

"""Gradients of powers in functions of their own: those of TensorFlow, with the exponents as constants."""

from __future__ import annotations

from tfpar.training.pipeline import powers

import numpy as np
import pytest
import tensorflow as tf


def operations_of_gradient(raised, base):
    """Gradient of the sum of `raised(base)`, and the kinds of operations in the function that computes it."""

    @tf.function(autograph=False)
    def function(value):
        with powers.constant_exponents():
            return raised(value)

    @tf.function(autograph=False)
    def gradient(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            total = tf.reduce_sum(function(value))
        return tape.gradient(total, value)

    library = gradient.get_concrete_function(base).graph.as_graph_def().library.function
    backward = [each for each in library if "backward" in each.signature.name]
    assert backward
    return gradient(base), {node.op for each in backward for node in each.node_def}


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 1.0, 2.0, 2.5, 3.0])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
def test_a_constant_exponent(exponent, dtype):
    base = tf.constant([0.25, 0.5, 1.0, 1.5, 3.0], dtype)
    got, operations = operations_of_gradient(lambda value: tf.pow(value, exponent), base)
    exact = exponent * base.numpy().astype(np.float64) ** (exponent - 1)
    np.testing.assert_allclose(got, exact, rtol=2e-3 if dtype == tf.float16 else 1e-6)
    assert ("Pow" in operations) == (exponent - 1 not in (0, 1, 2))


def test_negative_bases_of_a_cube():
    base = tf.constant([-2.0, -0.5, 0.0, 0.5])
    got, operations = operations_of_gradient(lambda value: value**3, base)
    np.testing.assert_allclose(got, 3 * base.numpy() ** 2)
    assert "Pow" not in operations


def test_other_exponents_have_the_gradient_of_tensorflow():
    base = tf.constant([[0.5, 1.5], [2.0, 3.0]])

    def raised(value):
        return tf.pow(value, [2.0, 3.0]) + tf.pow(2.0, value) + tf.pow(value, value)

    got, _ = operations_of_gradient(raised, base)
    with tf.GradientTape() as tape:
        tape.watch(base)
        total = tf.reduce_sum(raised(base))
    np.testing.assert_allclose(got, tape.gradient(total, base), rtol=1e-6)

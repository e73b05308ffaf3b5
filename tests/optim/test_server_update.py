"""The update on parameter servers, under a strategy of one device; real servers: tests/integration."""

from __future__ import annotations

from tfpar.optim.server_update import apply_on_servers

import keras
import numpy as np
import pytest
import tensorflow as tf


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.AdamW, keras.optimizers.Nadam])
def test_it_equals_keras_inside_a_branch(kind):
    """Two pushes with rates of their own, traced once; none of them stays with the optimizer."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    plain, served = (
        [
            keras.Variable(np.ones((2, 3), np.float32), name="kernel"),
            keras.Variable(np.ones(3, np.float32), name="bias"),
        ]
        for _ in range(2)
    )
    reference, optimizer = (kind(0.5, weight_decay=0.1) for _ in range(2))
    reference.build(plain)
    optimizer.build(served)
    gradients = [tf.fill([2, 3], 0.25), tf.fill([3], -0.5)]

    @tf.function(autograph=False)
    def push(rate):
        def apply():
            apply_on_servers(optimizer, strategy, gradients, served, rate)
            return tf.constant(True)

        return tf.cond(rate > 0.0, apply, lambda: tf.constant(False))

    for rate in (0.125, 0.0, 0.25):
        assert bool(push(tf.constant(rate))) is (rate > 0)
        if rate:
            reference.learning_rate = rate
            reference.apply(gradients, plain)
    assert push.experimental_get_tracing_count() == 1
    for ours, theirs in zip(served, plain, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6)
    assert int(optimizer.iterations.numpy()) == 2
    assert float(tf.convert_to_tensor(optimizer.learning_rate)) == 0.5

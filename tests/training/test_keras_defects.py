"""What Keras 3.15 gets wrong under a strategy, shown, and what tfpar does instead.

The fifth defect, `fit` under MultiWorkerMirroredStrategy, needs two processes: tests/integration/test_multi_worker.py.
"""

from __future__ import annotations

from tests.training.harness import Steps, linear_model, strategy_of
from tfpar.precision import LossScale

import keras
import numpy as np
import pytest
import tensorflow as tf

ONE = np.ones((1, 1))


def replica_values(strategy, values):
    """A PerReplica with one tensor per replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group], tf.float32)
    )


def test_keras_accumulation_fails_inside_a_function_under_a_strategy():
    strategy = strategy_of(2)
    with strategy.scope():
        model = linear_model()
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones((2, 1))], model.trainable_variables))

    with pytest.raises(RuntimeError, match="merge_call"):
        step()


@pytest.mark.parametrize("replicas", [1, 2])
def test_accumulation_equals_the_whole_batch(replicas):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(8, 2)), generator.normal(size=(8, 1))
    whole = Steps(1)
    whole.run([[(x, y, np.ones(8))]])
    accumulated = Steps(replicas)
    shares = [
        (x.reshape(2, replicas, -1, 2)[:, r], y.reshape(2, replicas, -1, 1)[:, r], np.ones((2, 4 // replicas)))
        for r in range(replicas)
    ]
    accumulated.run([shares], micro_batches=True)
    for weights in accumulated.weights():
        np.testing.assert_allclose(weights[0], whole.weights()[0][0], rtol=1e-6)


def test_keras_loss_scaling_poisons_every_weight_when_one_replica_overflows():
    strategy = strategy_of(2)
    with strategy.scope():
        model = linear_model()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
    gradients = replica_values(strategy, [np.ones((2, 1)), np.full((2, 1), np.inf)])

    @tf.function
    def step(gradients):
        strategy.run(lambda gradient: optimizer.apply([gradient], model.trainable_variables), args=(gradients,))

    step(gradients)
    assert not np.isfinite(model.get_weights()[0]).any()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("jit", [False, True])
def test_one_replica_that_overflows_stops_the_update_on_all(bad, jit):
    steps = Steps(
        2,
        optimizer=lambda: keras.optimizers.Adam(0.1),
        jit_compile=jit,
        scale_loss=True,
        growth_steps=2,
    )
    steps.loss_scale = LossScale(tf.constant(64.0), tf.constant(0))
    good = (np.ones((1, 2)), ONE * 3, np.ones(1))
    overflow = (np.full((1, 2), np.inf), ONE, np.ones(1))
    steps.run([[good, good]])
    before, moments = steps.weights(), [variable.numpy() for variable in steps.optimizer.variables]
    result = steps.run([[overflow, good] if bad == 0 else [good, overflow]])
    assert not result.finite.numpy()[0]
    assert steps.loss_scale.scale.numpy() == 32.0
    np.testing.assert_equal(steps.weights(), before)
    np.testing.assert_equal([variable.numpy() for variable in steps.optimizer.variables], moments)
    # And training goes on, with the scale growing again after two good updates.
    result = steps.run([[good, good], [good, good]])
    assert result.finite.numpy().all()
    assert steps.loss_scale.scale.numpy() == 64.0
    assert np.isfinite(steps.weights()[0][0]).all()
    np.testing.assert_array_equal(steps.weights()[0][0], steps.weights()[1][0])


# Two replicas pull in opposite directions: 10 and -8 make a mean of 1, which a clip to norm 1 leaves alone. Clipped one
# by one they are 1 and -1, and nothing is left.
OPPOSED = [10.0, -8.0]


def test_keras_clips_before_the_reduction():
    strategy = strategy_of(2)
    with strategy.scope():
        model = linear_model(1)
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        optimizer.build(model.trainable_variables)
    gradients = replica_values(strategy, [np.full((1, 1), value / 2) for value in OPPOSED])

    @tf.function
    def step(gradients):
        strategy.run(lambda gradient: optimizer.apply([gradient], model.trainable_variables), args=(gradients,))

    step(gradients)
    assert model.get_weights()[0] == pytest.approx(1.0)  # it did not move


def test_clipping_acts_on_the_reduced_gradient():
    steps = Steps(2, lambda: linear_model(1), lambda: keras.optimizers.SGD(1.0), clip_norm=1.0)
    # The gradient of (w x - y)^2 at w = x = 1 is 2 (1 - y).
    result = steps.run([[(ONE, ONE * (1 - value / 2), np.ones(1)) for value in OPPOSED]])
    assert result.norms.gradient.numpy() == pytest.approx(1.0)
    assert steps.weights()[0][0] == pytest.approx(0.0)  # 1 - 1.0 x 1
    # A mean beyond the norm is clipped to it.
    steps.run([[(ONE, ONE * -4, np.ones(1))] * 2])
    assert steps.weights()[0][0] == pytest.approx(-1.0)


X = np.array([[1.0], [2.0], [3.0]])
Y = np.array([[0.0], [0.0], [9.0]])
# d/dw of the mean of (w x - y)^2 at w = 1.
TRUE_GRADIENT = np.mean(2 * (X - Y) * X)


def test_keras_fit_weights_uneven_replicas_wrongly():
    strategy = strategy_of(2)
    with strategy.scope():
        model = linear_model(1)
        model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    # A full first batch that fits already (no gradient), since Keras builds its functions on an even one only.
    ones = np.ones((4, 1))
    model.fit(np.concatenate([ones, X]), np.concatenate([ones, Y]), batch_size=4, shuffle=False, verbose=0)
    moved = 1.0 - model.get_weights()[0][0, 0]
    assert moved != pytest.approx(TRUE_GRADIENT, rel=0.05)


def test_uneven_replicas_are_weighted_by_example():
    steps = Steps(2, lambda: linear_model(1), lambda: keras.optimizers.SGD(1.0))
    padded = (X[[2, 2]], Y[[2, 2]], np.array([1.0, 0.0]))
    result = steps.run([[(X[:2], Y[:2], np.ones(2)), padded]])
    assert result.count.numpy()[0] == 3
    assert result.loss.numpy()[0] == pytest.approx(np.mean((X - Y) ** 2))
    for weights in steps.weights():
        assert 1.0 - weights[0][0, 0] == pytest.approx(TRUE_GRADIENT, rel=1e-6)

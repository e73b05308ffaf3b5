"""The step on hand-made batches: several steps a call, norms, statistics, EMA, precision."""

from __future__ import annotations

import dataclasses
import functools
import time

from tests.training.harness import Steps, linear_model
from tfpar.exchange import Exchange, residuals
from tfpar.precision import LossScale
from tfpar.training import norms

import keras
import numpy as np
import pytest
import tensorflow as tf


def random_steps(count, replicas=1, size=4, features=2, seed=0):
    generator = np.random.default_rng(seed)
    return [
        [
            (generator.normal(size=(size, features)), generator.normal(size=(size, 1)), np.ones(size))
            for _ in range(replicas)
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("jit", [False, True])
def test_several_steps_a_call_equal_single_ones(replicas, jit):
    batches = random_steps(6, replicas)
    together = Steps(replicas, optimizer=lambda: keras.optimizers.Adam(0.1), jit_compile=jit)
    losses = together.run(batches).loss.numpy()
    one_by_one = Steps(replicas, optimizer=lambda: keras.optimizers.Adam(0.1), jit_compile=jit)
    single = [one_by_one.run([batch]).loss.numpy()[0] for batch in batches]
    np.testing.assert_array_equal(losses, single)
    np.testing.assert_array_equal(together.weights()[0][0], one_by_one.weights()[0][0])
    assert together.optimizer.iterations.numpy() == 6

    in_turn = Steps(replicas, optimizer=lambda: keras.optimizers.Adam(0.1), jit_compile=jit)
    in_turn.step.plan = dataclasses.replace(in_turn.step.plan, prefetches_in_loop=False)  # as with several GPUs
    np.testing.assert_array_equal(in_turn.run(batches).loss.numpy(), losses)
    np.testing.assert_array_equal(in_turn.weights()[0][0], together.weights()[0][0])


def test_the_number_of_steps_a_call_does_not_retrace():
    steps = Steps(1)
    for count in (1, 3, 2, 5):
        steps.run(random_steps(count))
    assert steps.step.run.experimental_get_tracing_count() <= 2  # reduce_retracing may relax once


def test_norms_are_those_of_the_update():
    steps = Steps(1, optimizer=lambda: keras.optimizers.SGD(0.5))
    before = steps.weights()[0][0].copy()
    result = steps.run(random_steps(1))
    after = steps.weights()[0][0]
    assert result.norms.parameter.numpy() == pytest.approx(np.linalg.norm(after), rel=1e-5)
    assert result.norms.update.numpy() == pytest.approx(np.linalg.norm(after - before), rel=1e-4)
    assert result.norms.gradient.numpy() == pytest.approx(2 * result.norms.update.numpy(), rel=1e-4)


def test_the_exchange_lasts_until_all_gradients_have_arrived():
    model = functools.partial(keras.Sequential, [keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    steps = Steps(1, model, jit_compile=False)
    reduce = steps.step.exchange.reduce_sums

    def late(value):
        time.sleep(0.3)
        return value

    def reduce_sums(*arguments):
        [first, *others], sidecar = reduce(*arguments)
        return [tf.ensure_shape(tf.py_function(late, [first], first.dtype), first.shape), *others], sidecar

    steps.step.exchange.reduce_sums = reduce_sums
    [[_, _, exchange, *_]] = steps.run(random_steps(1)).durations.numpy()
    assert exchange >= 0.2  # less than it takes, because nothing orders the timestamp and the beginning of the call


def test_durations_add_up():
    result = Steps(2).run(random_steps(5, 2))
    durations = result.durations.numpy()
    assert durations.shape == (5, 6)
    assert (durations >= 0).all()
    np.testing.assert_allclose(durations[:, :4].sum(axis=1), durations[:, 4], atol=1e-6)


def test_local_batch_statistics_are_averaged_by_example():
    def model():
        return keras.Sequential(
            [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0, name="norm"), keras.layers.Dense(1)]
        )

    steps = Steps(2, model, jit_compile=False)
    # Plain Keras normalisation: each replica has its own batch mean, 1 and 4; weights 1 and 3 examples.
    few = (np.full((3, 1), 1.0), np.zeros((3, 1)), np.array([1.0, 0.0, 0.0]))
    many = (np.full((3, 1), 4.0), np.zeros((3, 1)), np.ones(3))
    steps.run([[few, many]])
    for replica in range(2):
        mean = steps.strategy.experimental_local_results(steps.model.get_layer("norm").moving_mean.value)[replica]
        assert mean.numpy()[0] == pytest.approx((1 * 1.0 + 3 * 4.0) / 4)


def test_a_replica_without_examples_changes_nothing():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(4, 2)), generator.normal(size=(4, 1))
    alone, padded = Steps(1, jit_compile=False), Steps(2, jit_compile=False)
    alone.run([[(x, y, np.ones(4))]])
    padded.run([[(x, y, np.ones(4)), (x, y, np.zeros(4))]])
    for weights in padded.weights():
        np.testing.assert_allclose(weights[0], alone.weights()[0][0], rtol=1e-6)


def test_a_step_of_masked_positions_keeps_a_residual():
    """Without anything to divide by, it cannot be applied."""

    def model():
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Embedding(9, 64, mask_zero=True), keras.layers.Dense(1)]
        )

    steps = Steps(1, model, loss=keras.losses.MeanSquaredError(), jit_compile=False)
    old = [Exchange("int4:min_elements=64") for _ in range(2)]
    for worker, exchange in enumerate(old):
        exchange.build(steps.model.trainable_variables, workers=2, worker=worker)
        for residual in exchange.state[1:]:
            residual.assign(tf.ones(residual.shape))
    steps.step.exchange.restore(2, lambda worker: old[worker].export())
    before = steps.weights()[0]
    masked, usual = (np.full((4, 3), token) for token in (0, 1))
    y = np.ones((4, 3, 1))
    steps.run([[(masked, y, np.ones(4))]])
    for value, old_value in zip(steps.weights()[0], before, strict=True):
        np.testing.assert_array_equal(value, old_value)
    pending = residuals.total_pending([steps.step.exchange.export()])
    np.testing.assert_array_equal(pending, residuals.total_pending([one.export() for one in old]))
    divisor = steps.run([[(usual, y, np.ones(4))]]).loss_counts.numpy()
    assert not residuals.total_pending([steps.step.exchange.export()]).any()
    unread = steps.weights()[0][0][2:] - before[0][2:]  # tokens without a gradient of their own
    np.testing.assert_allclose(unread, -0.1 * pending[2 * 64 : 9 * 64].reshape(7, 64) / divisor, rtol=1e-5)


def test_seed_generator_state_stays_and_dropout_varies_by_step_and_replica():
    def model():
        return keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), *linear_model(64).layers])

    ones = (np.ones((1, 64)), np.zeros((1, 1)), np.ones(1))
    one, again, two = (
        Steps(replicas, model, lambda: keras.optimizers.SGD(0.0), jit_compile=False) for replicas in (1, 1, 2)
    )
    losses = one.run([[ones]] * 4).loss.numpy()
    assert len(set(losses)) > 1
    np.testing.assert_array_equal(again.run([[ones]] * 4).loss.numpy(), losses)
    assert two.run([[ones, ones]]).loss.numpy()[0] != losses[0]


def test_mixed_float16_trains_with_a_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    steps = Steps(2, scale_loss=True, growth_steps=1000)
    steps.loss_scale = LossScale(tf.constant(2.0**15), tf.constant(0))
    result = steps.run(random_steps(1, 2) * 20)
    finite = result.finite.numpy()
    keras.config.set_dtype_policy("float32")
    expected = Steps(2).run(random_steps(1, 2) * int(finite.sum())).loss.numpy()
    # The first scale overflows float16 on this data: those steps are left out, and the rest is the float32 run.
    assert 0 < (~finite).sum() < 5
    assert steps.loss_scale.scale.numpy() == 2.0 ** (15 - (~finite).sum())
    np.testing.assert_allclose(result.loss.numpy()[finite], expected, rtol=0.01)


def test_a_lone_replica_does_its_step_as_one_xla_program():
    """Reads, both halves of the step and assignments compiled together, as on a TPU; here for the CPU."""
    options = {"metrics": ["mean_squared_error"], "optimizer": lambda: keras.optimizers.AdamW(0.01), "clip_norm": 1.0}
    compiled, plain = Steps(1, **options), Steps(1, jit_compile=False, **options)
    batches = random_steps(5)
    actual, expected = compiled.run(batches), plain.run(batches)
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
    np.testing.assert_allclose(actual.norms.gradient, expected.norms.gradient, rtol=1e-5)
    np.testing.assert_allclose(compiled.weights()[0][0], plain.weights()[0][0], rtol=1e-5)
    assert compiled.optimizer.iterations.numpy() == 5
    batch = [tf.constant(part[None], tf.float32) for part in batches[0][0]]
    arguments = (batch, tf.constant(0, tf.int64), tf.constant(0.01), compiled.loss_scale)
    hlo = compiled.step._whole_step.experimental_get_compiler_ir(*arguments)(stage="hlo")
    assert "ENTRY" in hlo
    assert "dot(" in hlo
    # The update is left out, not undone, where a gradient is not finite; and the norm is taken once more where its
    # square overflows.
    assert hlo.count("conditional(") == 2


NORMS = [
    norms.l2_norm,
    tf.function(functools.partial(norms.l2_norm, squared=norms.squared_in_xla), jit_compile=True),
]


@pytest.mark.parametrize("shape", [(), (3,), (64,), (72,), (1000, 3), (17, 19)])
def test_the_norm_for_xla_is_the_norm(shape):
    values = [np.random.default_rng(7).normal(size=shape).astype(np.float32), np.ones((5,), np.float32)]
    expected = sum(np.sum(np.square(value, dtype=np.float64)) for value in values)
    tensors = [tf.constant(value) for value in values]
    np.testing.assert_allclose(tf.function(norms.squared_in_xla, jit_compile=True)(tensors), expected, rtol=1e-6)
    for norm in NORMS:
        np.testing.assert_allclose(norm(tensors), np.sqrt(expected), rtol=1e-6)
    for bad in (np.inf, np.nan):
        spoiled = values[0].copy()
        spoiled.reshape(-1)[-1] = bad
        for norm in NORMS:
            assert not np.isfinite(norm([tf.constant(spoiled), tensors[1]]))


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**70, 2.0**110])
def test_the_norm_where_its_square_overflows(scale):
    values = [np.random.default_rng(7).normal(size=shape).astype(np.float32) for shape in [(), (1000, 3), (17, 19)]]
    expected = np.sqrt(sum(np.sum(np.square(value, dtype=np.float64)) for value in values)) * scale
    tensors = [tf.constant(value * np.float32(scale)) for value in values]
    for norm in NORMS:
        np.testing.assert_allclose(norm(tensors), expected, rtol=1e-6)
    assert np.isinf(norms.l2_norm([tf.fill([4], 3e38)]))  # more than float32 holds


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_finite_gradients_whose_squares_overflow_are_applied(replicas, jit, clip_norm):
    """As `model.fit` does. The gradient of each example is [3e19, 4e19], and so is the mean."""
    rate = 1.0 if clip_norm else 1e-19
    options = {"loss": lambda y, outputs: outputs[..., 0] + 0.0 * y[..., 0], "clip_norm": clip_norm, "jit_compile": jit}
    steps = Steps(replicas, optimizer=lambda: keras.optimizers.SGD(rate), **options)
    batch = (np.array([[3e19, 4e19]] * 2), np.zeros((2, 1)), np.ones(2))
    result = steps.run([[batch] * replicas])
    assert result.finite.numpy().all()
    np.testing.assert_allclose(result.norms.gradient, 5e19, rtol=1e-6)
    expected = 1.0 - (np.array([0.6, 0.8]) if clip_norm else np.array([3.0, 4.0]))
    for weights in steps.weights():
        np.testing.assert_allclose(weights[0][:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_whose_sum_would_overflow_are_left_out(replicas):
    """Two of 3e38 are more than float32 holds; one is not, and no replica may apply it."""
    loss = lambda y, outputs: outputs[..., 0] + 0.0 * y[..., 0]  # noqa: E731
    steps = Steps(replicas, loss=loss, jit_compile=False, optimizer=lambda: keras.optimizers.SGD(1e-37))
    batch = (np.array([[3e38, 0.0]]), np.zeros((1, 1)), np.ones(1))
    result = steps.run([[batch] * replicas])
    assert result.finite.numpy().tolist() == [replicas == 1]
    for weights in steps.weights():
        np.testing.assert_allclose(weights[0][:, 0], [-29.0 if replicas == 1 else 1.0, 1.0], rtol=1e-5)

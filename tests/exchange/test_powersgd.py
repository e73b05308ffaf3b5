"""PowerSGD: the size of the factors."""

from __future__ import annotations

from tfpar import models
from tfpar.exchange import Exchange
from tfpar.exchange.algorithms.powersgd import PowerSGD, PowerSGDOptions, scaled

import numpy as np
import pytest
import tensorflow as tf


@pytest.fixture(scope="module")
def resnet18_shapes() -> list[tf.TensorShape]:
    model = models.build("resnet18", models.TaskSpec("classification", (32, 32, 3), "float32", 10))
    return [tf.TensorShape(variable.shape) for variable in model.trainable_variables]


@pytest.mark.parametrize(("rank", "ratio"), [(1, 243), (2, 136), (4, 72)])
def test_ratios_of_the_paper(resnet18_shapes, rank, ratio):
    """Vogels et al. 2019, table 3: ResNet-18 on 32x32, 1-D tensors dense."""
    exchange = Exchange(f"powersgd:{rank}")
    exchange.build([tf.TensorSpec(shape) for shape in resnet18_shapes], workers=2, worker=0)
    dense = 4 * sum(shape.num_elements() for shape in resnet18_shapes)
    assert dense == 4 * 11_173_962
    assert dense / exchange.traffic(2, 0).payload_bytes == pytest.approx(ratio, rel=0.01)


class Twins:
    """Two members with the same gradients."""

    size, rank, members = 2, 0, (0, 1)

    def all_reduce(self, value, instance):
        del instance
        return 2.0 * value


def test_a_step_without_a_gradient_leaves_the_factors():
    """As before a layer that begins with zeros. Factors of zeros send nothing of a matrix whose first rows are zero, as
    those of pixels or tokens that never occur, however large the residual grows."""
    matrix = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    matrix[:5] = 0.0
    found = []
    for gradients in ([matrix], [np.zeros_like(matrix), matrix]):
        bucket = PowerSGD(PowerSGDOptions(), [tf.TensorShape(matrix.shape)], Twins(), 0, "bucket")
        for step, gradient in enumerate(gradients):
            (total,), _ = bucket.reduce([tf.constant(gradient)], tf.constant(step, tf.int64))
        found.append(total.numpy())
    assert np.linalg.norm(found[0]) > 0.2 * np.linalg.norm(2.0 * matrix)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)


def bucket_of(matrix: np.ndarray) -> PowerSGD:
    return PowerSGD(PowerSGDOptions(), [tf.TensorShape(matrix.shape)], Twins(), 0, "bucket")


def sum_of(bucket: PowerSGD, gradient: np.ndarray) -> np.ndarray:
    (total,), _ = bucket.reduce([tf.constant(gradient)], tf.constant(0, tf.int64))
    return total.numpy()


@pytest.mark.parametrize("factor", [2.0**70, 2.0**-70])
def test_sizes_of_gradients_change_no_bits(factor):
    """QR decompositions square numbers: 1e20 became NaN, for good, and 1e-20 zero."""
    matrices = np.random.default_rng(0).normal(size=(3, 64, 32)).astype(np.float32)
    usual, other = bucket_of(matrices[0]), bucket_of(matrices[0])
    for matrix in matrices:
        expected = sum_of(usual, matrix)
        np.testing.assert_array_equal(sum_of(other, matrix * np.float32(factor)), expected * np.float32(factor))


def test_a_large_step_among_usual_ones():
    matrices = np.random.default_rng(0).normal(size=(4, 64, 32)).astype(np.float32)
    matrices[1] *= 1e20
    bucket = bucket_of(matrices[0])
    for matrix in matrices:
        assert np.isfinite(sum_of(bucket, matrix)).all()
    assert all(np.isfinite(variable.numpy()).all() for variable in bucket.state.values())


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_sums_that_are_not_finite_leave_the_state(value):
    matrix = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    bucket = bucket_of(matrix)
    sum_of(bucket, matrix)
    before = {name: variable.numpy() for name, variable in bucket.state.items()}
    assert not np.isfinite(sum_of(bucket, np.full_like(matrix, value))).all()
    for name, variable in bucket.state.items():
        np.testing.assert_array_equal(variable.numpy(), before[name])


def test_scaling_is_exact():
    for value in (1.0, 1.5, 3.9e18, 2e38, 1.2e-38):
        (found,) = scaled(tf.constant([value], tf.float32)).numpy()
        assert 1.0 <= found < 2.0
        assert np.frexp(found)[0] == np.frexp(np.float32(value))[0]
    np.testing.assert_array_equal(scaled(tf.zeros([2])), [0.0, 0.0])

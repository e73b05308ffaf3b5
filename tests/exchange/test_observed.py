"""What an exchange reports about its residuals: norms, which only some exchanges measure."""

from __future__ import annotations

from collections.abc import Iterator

from tests.collectives.one_member import group_of_one
from tfpar.collectives.gloo import PipelinedGlooGroup
from tfpar.exchange.algorithms.two_phase import TwoPhase
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.spec import parse
from tfpar_ops import Codec
from tfpar_ops.transport_library import why_unusable

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here")
SHAPE = tf.TensorShape([50, 60])


@pytest.fixture
def group() -> Iterator[PipelinedGlooGroup]:
    with group_of_one() as group:
        yield group


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("later", [True, False])
def test_every_eighth_exchange_measures_norms(group, pipeline, later):
    """In one operation and in several: an exchange without norms has the sums and the residuals of one with them."""
    codec, values = Codec("int4", block=64), np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)

    def exchanged(step: int) -> list[np.ndarray]:
        bucket = TwoPhase(codec, [SHAPE], group, 1, "b", error_feedback=True, pipeline=pipeline)
        pending = [] if later else None
        sums, norms = bucket.reduce([tf.constant(values)], tf.constant(step, tf.int64), pending)
        for variable, value in pending or []:
            variable.assign(value)
        return [value.numpy() for value in (norms, *sums, *bucket.state.values())]

    measured, *expected = exchanged(8)
    np.testing.assert_allclose(measured, [np.vdot(each, each) for each in (values, expected[1])], rtol=1e-5)
    for step in (1, 7):
        norms, *others = exchanged(step)
        assert np.isnan(norms).all()
        for one, other in zip(others, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_latest_measured_norms_are_reported(group):
    reducer = CompressedReducer(parse("int4:min_elements=0"), [SHAPE], group, "/cpu:0", 1)
    generator = np.random.default_rng(0)
    found = []
    for _ in range(10):
        gradient = tf.constant(generator.standard_normal(SHAPE).astype(np.float32))
        reducer.reduce_on_device([gradient], tf.ones([1]), lambda sidecar: sidecar[0] > 0)
        found.append(reducer.observed()["residual_over_gradient"])
    assert 0.0 < found[0] < 1.0
    assert found[0] == found[7] != found[8] == found[9]

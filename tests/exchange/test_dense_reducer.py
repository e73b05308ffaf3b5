"""How tensors and the sidecar are put together for the exchange of `none`, and taken apart again."""

from __future__ import annotations

from tfpar.collectives.gloo import GlooGroup
from tfpar.collectives.tensorflow import world_group
from tfpar.exchange.buckets import DENSE_BUCKET_BYTES
from tfpar.exchange.dense_reducer import DenseReducer
from tfpar.exchange.fusion import Fusion

import numpy as np
import pytest
import tensorflow as tf

LARGE = (1 << 10, 1 << 10)  # 4 MiB as float32
ALONE = world_group(1, 0)  # whose sums are what it has


def numbered(shapes):
    return [tf.random.stateless_normal(shape, [number, 1]) for number, shape in enumerate(shapes)]


@pytest.mark.parametrize("sidecar", [0, 3])
@pytest.mark.parametrize(
    ("shapes", "buckets"),
    [
        ([(3,), LARGE, (2, 5), (), LARGE, (7,)], 3),
        ([LARGE, LARGE], 2),
        ([LARGE], 1),
        ([(3, 1), (2,)], 1),
        ([(0,), (4,)], 1),
    ],
)
def test_what_goes_in_comes_out(shapes, buckets, sidecar):
    static = [tf.TensorShape(shape) for shape in shapes]
    reducer = DenseReducer(static, ALONE, "CPU:0", DENSE_BUCKET_BYTES)
    gradients, extra = numbered(shapes), tf.range(sidecar, dtype=tf.float32)
    fused = Fusion(static, DENSE_BUCKET_BYTES).fuse(gradients, extra)
    assert len(fused) == buckets
    assert sum(len(buffer) for buffer in fused) == sum(int(np.prod(shape)) for shape in shapes) + sidecar
    sums, total = tf.function(lambda *given: reducer.reduce(*given, lambda _: True), autograph=False)(gradients, extra)
    np.testing.assert_array_equal(total, extra)
    for result, gradient in zip(sums, gradients, strict=True):
        np.testing.assert_array_equal(result, gradient)
        assert result.shape == gradient.shape


def test_a_transport_that_sums_in_chunks_copies_smaller_tensors_only():
    shapes = [tf.TensorShape(shape) for shape in ((64,), (256, 256), (128, 256), (1024, 512))]
    group = GlooGroup((0, 1), 0, mesh=0, workers=(0, 1))
    reducers = [DenseReducer(shapes, each, "CPU:0", DENSE_BUCKET_BYTES) for each in (ALONE, group)]
    together, apart = (
        [len(each) for each in reducer._fusion.fuse(numbered(shapes), tf.zeros([1]))] for reducer in reducers
    )
    assert together == [64 + 256 * 256 + 128 * 256 + 1024 * 512 + 1]
    assert apart == [64 + 128 * 256 + 1, 256 * 256, 1024 * 512]


def test_small_tensors_around_a_large_one_travel_together():
    shapes = [(3,), LARGE, (2, 5)]
    small, large = Fusion([tf.TensorShape(shape) for shape in shapes], DENSE_BUCKET_BYTES).fuse(
        numbered(shapes), tf.zeros([1])
    )
    assert len(small) == 3 + 10 + 1
    assert len(large) == 1 << 20

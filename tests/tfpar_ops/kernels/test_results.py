"""Results of the native operations: the reference's bits on any number of threads, norms, and no elements at all."""

from __future__ import annotations

import os
import sys

import tfpar_ops
from tests import nursery
from tests.tfpar_ops import data
from tests.tfpar_ops.checkout import ROOT
from tests.tfpar_ops.kernels.harness import CODECS, ELEMENTS, INT4, SHAPES, assert_same, residual, seed_step, tensors
from tfpar_ops import reference

import numpy as np
import pytest
import tensorflow as tf


@pytest.mark.parametrize("codec", CODECS, ids=data.identifier)
def test_work_in_many_units_gives_the_references_bits(codec):
    """Long enough to be spread over threads, in parts that no unit of work ends with."""
    made = tfpar_ops.encode(tensors(), residual(), codec, shards=3, seed_step=seed_step(codec))
    expected = reference.encode(tensors(), residual(), codec, shards=3, seed_step=seed_step(codec))
    assert_same(made, expected)
    for actual, wanted in zip(
        tfpar_ops.decode(made.payload, codec, SHAPES, factor=0.3),
        reference.decode(made.payload, codec, SHAPES, factor=0.3),
        strict=True,
    ):
        assert actual.shape == wanted.shape
        data.same(actual.numpy(), wanted.numpy())

    size = ELEMENTS + 9
    peers = [
        tfpar_ops.encode(tensors(i), None, codec, shard_elements=size, seed_step=seed_step(codec)) for i in range(3)
    ]
    payloads = tf.concat([peer.payload for peer in peers], 0)
    data.same(
        tfpar_ops.decode_sum(payloads, codec, size, factor=1 / 3).numpy(),
        reference.decode_sum(payloads, codec, size, factor=1 / 3).numpy(),
    )
    options = {"factor": 1 / 3, "begin": 7 * codec.block, "valid": ELEMENTS, "seed_step": seed_step(codec)}
    assert_same(
        tfpar_ops.recode(payloads, residual(), codec, size, **options),
        reference.recode(payloads, residual(), codec, size, **options),
    )


_FINGERPRINT = """
import hashlib, sys
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
import numpy as np
import tfpar_ops
from tests.tfpar_ops.kernels.harness import CODECS, ELEMENTS, INT4, residual, seed_step, tensors
digest = hashlib.sha256()
def add(*results):
    for result in results:
        digest.update(np.asarray(result).tobytes())
norm, finite = tfpar_ops.norm_squared(tensors())
add(norm, finite)
for codec in CODECS:
    made = tfpar_ops.encode(tensors(), residual(), codec, seed_step=seed_step(codec))
    payloads = tf.concat([made.payload] * 3, 0)
    again = tfpar_ops.recode(payloads, residual(2), codec, ELEMENTS, factor=0.3, seed_step=seed_step(codec))
    add(*made, *again, tfpar_ops.decode_sum(payloads, codec, ELEMENTS))
assert tfpar_ops.uses_library()
print(digest.hexdigest())
"""


def test_results_do_not_depend_on_the_number_of_threads():
    """The norms too, which are sums: bits of every operation with 1, 2 and 8 threads of TensorFlow's pool."""
    found = {}
    for threads in (1, 2, 8):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        result = nursery.run(
            [sys.executable, "-c", _FINGERPRINT, str(threads)],
            cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        found[threads] = result.stdout.strip()
    assert len(found[1]) == 64
    assert found[1] == found[2] == found[8]


def test_norms_are_exact_to_float32():
    made = tfpar_ops.encode(tensors(), residual(), INT4)
    x = np.concatenate([np.ravel(part) for part in tensors()]).astype(np.float64)
    left = made.residual.numpy().astype(np.float64)
    np.testing.assert_allclose(made.norms, [x @ x, left @ left], rtol=1e-6)
    assert tfpar_ops.encode(tensors(), None, INT4).norms[1] == 0
    norm, finite = tfpar_ops.norm_squared(tensors())
    np.testing.assert_allclose(norm, x @ x, rtol=1e-6)
    assert finite


@pytest.mark.parametrize("ops", [tfpar_ops, reference])
def test_without_norms_all_else_has_the_same_bits(ops):
    made = ops.encode(tensors(), residual(), INT4)
    again = ops.recode(made.payload, residual(2), INT4, ELEMENTS)
    for measures in (False, np.bool_(False), tf.constant(False)):
        bare = ops.encode(tensors(), residual(), INT4, measures_norms=measures)
        bare_again = ops.recode(made.payload, residual(2), INT4, ELEMENTS, measures_norms=measures)
        for one, other in ((made, bare), (again, bare_again)):
            np.testing.assert_array_equal(one.payload, other.payload)
            np.testing.assert_array_equal(one.residual, other.residual)
            assert np.isnan(other.norms).all()


@pytest.mark.parametrize("ops", [tfpar_ops, reference])
def test_whether_norms_are_measured_is_a_bool(ops):
    with pytest.raises(TypeError, match="measures_norms"):
        ops.encode(tensors(), residual(), INT4, measures_norms=1)
    with pytest.raises(ValueError, match=r"measures_norms.*scalar"):
        ops.encode(tensors(), residual(), INT4, measures_norms=[True, False])


@pytest.mark.parametrize(
    ("value", "norm", "finite"),
    [(np.nan, np.nan, False), (np.inf, np.inf, False), (-np.inf, np.inf, False), (3e38, np.inf, True)],
)
def test_finite_says_whether_every_element_is(value, norm, finite):
    """Also where the norm itself is beyond float32."""
    vector = np.zeros(100_000, np.float32)
    vector[77_777] = value
    result = tfpar_ops.norm_squared([tf.zeros([3]), tf.constant(vector)])
    np.testing.assert_equal(result[0].numpy(), np.float32(norm))
    assert bool(result[1]) is finite


def test_nothing_at_all():
    """No tensors, no elements: a payload that is a header."""
    for none in ([], [tf.zeros([0])]):
        made = tfpar_ops.encode(none, tf.zeros([0]), INT4)
        assert made.payload.shape == (1, 4)
        assert made.residual.shape == (0,)
        assert tfpar_ops.encode(none, None, INT4, shards=3).payload.shape == (3, 4)
        assert tfpar_ops.norm_squared(none)[0] == 0
    assert tfpar_ops.decode(made.payload, INT4, []) == []
    assert tfpar_ops.decode_sum(made.payload, INT4, 0).shape == (0,)
    assert tfpar_ops.recode(made.payload, None, INT4, 0).payload.shape == (1, 4)

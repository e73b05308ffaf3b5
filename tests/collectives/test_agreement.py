"""Agreements between workers, with one worker; with several: tests/integration/test_agreement.py."""

from __future__ import annotations

from tests.training.harness import strategy_of
from tfpar.collectives.agreement import Agreement, sum_over_workers

import numpy as np
import pytest
import tensorflow as tf


@pytest.mark.parametrize("replicas", [1, 3])
def test_alone_one_agrees_with_oneself(replicas):
    agreement = Agreement(strategy_of(replicas), workers=1)
    assert agreement.mean(0.1) == 0.1  # the same bits: not through float32, not divided
    assert np.isnan(agreement.mean(float("nan")))
    assert agreement.gather(-7) == [-7]
    assert agreement.all_equal([])
    assert agreement.all_equal([3, -(2**26), 0])


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_worker_counts_once_however_many_replicas_it_has(replicas):
    strategy = strategy_of(replicas)
    value = tf.constant([1.0, 2.5], tf.float64)
    total = tf.function(lambda: sum_over_workers(strategy, value, 1))()
    np.testing.assert_array_equal(total, value)
    assert total.dtype == tf.float64

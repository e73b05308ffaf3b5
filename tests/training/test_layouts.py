"""The same seed, data and global batch give the same weights on every layout of one process.

Several processes: tests/integration/test_multi_worker.py.
"""

from __future__ import annotations

import functools

from tests.training import layouts
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

import numpy as np
import pytest


@functools.cache
def trained(strategy: str, devices: int, accumulate_steps: int) -> tuple[dict[str, np.ndarray], float]:
    runtime = strategies.build(choose_topology(StrategyConfig(strategy=strategy, devices=devices)))
    trainer, summary = layouts.train(strategy, devices, accumulate_steps, runtime=runtime)
    return layouts.weights_of(trainer), summary["eval"]["loss"]


@pytest.mark.parametrize("accumulate_steps", [1, 4])
@pytest.mark.parametrize("devices", [2, 3])
def test_mirrored_equals_one_device(devices, accumulate_steps):
    expected, expected_loss = trained("one_device", 1, accumulate_steps)
    actual, actual_loss = trained("mirrored", devices, accumulate_steps)
    assert_same_weights(actual, expected)
    assert actual_loss == pytest.approx(expected_loss, rel=1e-4)


def test_training_moved_the_weights():
    one, _ = trained("one_device", 1, 1)
    other, _ = trained("one_device", 1, 4)
    # Accumulation changes what batch normalisation normalises over, so these two must differ: else the comparison
    # above would compare nothing.
    assert any(np.abs(one[name] - other[name]).max() > 1e-3 for name in one)


def assert_same_weights(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5, err_msg=name)

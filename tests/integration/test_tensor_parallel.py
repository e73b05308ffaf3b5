"""Meshes of a data and a model axis on real workers: the weights of one device, the bytes of the formula, resumed."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tests.integration.scripts import divided
from tests.integration.test_multi_worker import launch
from tests.training.test_tensor_parallel import alone
from tfpar.config import ConfigError

import numpy as np
import pytest

pytestmark = pytest.mark.cluster
MESH = {"mesh": "data:2,model:2", "devices": 2}


def on_two_workers(folder: pathlib.Path, *cases: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """What each case leaves, the same on both workers."""
    folder.mkdir()
    result = launch(2, "-m", "tests.integration.scripts.divided", str(folder), json.dumps(cases), timeout=600.0)
    assert result.returncode == 0, result.stdout + result.stderr
    found = []
    for number in range(len(cases)):
        first, second = (dict(np.load(folder / f"{number}-{worker}.npz")) for worker in range(2))
        for name, value in first.items():
            np.testing.assert_array_equal(second[name], value, err_msg=name)
        found.append(first)
    return found


def assert_near(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """As near as an exchange of 4 bits leaves it, and not the same."""
    distance = sum(float(np.sum((found[name] - value) ** 2)) for name, value in expected.items()) ** 0.5
    assert 0.0 < distance < 0.2 * sum(float(np.sum(value**2)) for value in expected.values()) ** 0.5


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_two_workers_of_two_devices(tmp_path):
    """They equal one device, also with micro-batches and a loss whose parts are summed beforehand; with int4 they stay
    near it; and a run that was stopped goes on to the same bits."""
    int4 = {**MESH, "exchange": "int4:min_elements=64"}
    saved = {**int4, "workdir": str(tmp_path / "run")}
    dense, language_model, encoded, _, resumed = on_two_workers(
        tmp_path / "out",
        {**MESH, "accumulate_steps": 2},
        {**MESH, "model": "language_model", "steps": 6},
        int4,
        {**saved, "stop_after": 11},
        saved,
    )
    expected = alone("dense", accumulate_steps=2)[0]
    assert_close(dense, expected)
    assert_close(language_model, alone("language_model", steps=6)[0])
    for name, value in encoded.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert_near(encoded, expected)
    assert int(encoded["sent"]) < int(dense["sent"]) / 2

    with pytest.raises(ConfigError, match=r"--mesh: the saved run had replicas of 2 devices each, .* previous --mesh"):
        divided.here("one_device", workdir=str(tmp_path / "run"), steps=divided.STEPS + 1)

"""Pipelines on real workers, each of which holds a replica: the weights of one device, the bytes, resumed."""

from __future__ import annotations

from tests.integration.test_tensor_parallel import assert_close, assert_near, on_workers
from tests.training.test_tensor_parallel import alone

import numpy as np
import pytest

pytestmark = pytest.mark.cluster
MESH = {"mesh": "data:2,pipeline:2", "devices": 2, "accumulate_steps": 2}


def test_two_workers_of_two_stages(tmp_path):
    """They equal one device; with int4, each stage's gradients travel from its own device, the run stays near one
    device, and one that was stopped goes on to the same bits."""
    int4 = {**MESH, "exchange": "int4:min_elements=64"}
    saved = {**int4, "workdir": str(tmp_path / "run")}
    dense, encoded, _, resumed = on_workers(2, tmp_path / "out", MESH, int4, {**saved, "stop_after": 11}, saved)
    expected = alone("dense", accumulate_steps=2)[0]
    assert_close(dense, expected)
    for name, value in encoded.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert_near(encoded, expected)
    assert int(encoded["sent"]) < int(dense["sent"]) / 2


@pytest.mark.proof
def test_three_axes(tmp_path):
    """Two workers, each with a pipeline of two stages whose layers are divided over two devices."""
    mesh = {"mesh": "data:2,pipeline:2,model:2", "devices": 4, "accumulate_steps": 2}
    dense, encoded = on_workers(2, tmp_path / "out", mesh, {**mesh, "exchange": "int4:min_elements=64"})
    expected = alone("dense", accumulate_steps=2)[0]
    assert_close(dense, expected)
    assert_near(encoded, expected)
    assert int(encoded["sent"]) < int(dense["sent"]) / 2

"""Keras habits on real workers: callbacks, history, predictions."""

from __future__ import annotations

from tests.integration.test_multi_worker import launch

import numpy as np
import pytest

pytestmark = pytest.mark.cluster


def test_two_workers_stop_report_and_predict_as_one(tmp_path):
    """A callback that ends training on one worker ends it on all; history and predictions are those of one process."""
    for workers, strategy, folder in ((2, "multi_worker", "two"), (1, "one_device", "one")):
        (tmp_path / folder).mkdir()
        output = str(tmp_path / folder / "RANK.npz")
        result = launch(workers, "-m", "tests.integration.scripts.habits", strategy, output)
        assert result.returncode == 0, result.stdout + result.stderr
    expected, *workers = (dict(np.load(tmp_path / name)) for name in ("one/0.npz", "two/0.npz", "two/1.npz"))
    assert expected["epoch"].tolist() == [0, 1]
    for found in workers:
        assert found.keys() == expected.keys()
        assert np.array_equal(found["predicted"], workers[0]["predicted"])
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5, err_msg=name)

"""A run that goes on with other numbers of workers: every example once an epoch, nothing undelivered is lost."""

from __future__ import annotations

import json

from tests.faults import elastic
from tests.integration.test_multi_worker import launch
from tfpar.checkpoint import checkpointer
from tfpar.exchange.residuals import total_pending

import numpy as np
import pytest

pytestmark = pytest.mark.cluster


def train(folder, workers, stop_after=0):
    folder.mkdir(exist_ok=True)
    result = launch(workers, "-m", "tests.faults.elastic", str(folder), str(stop_after))
    assert result.returncode == 0, result.stdout + result.stderr


def seen_by_chief(folder):
    return sum(np.load(path) for path in folder.glob("seen-*-0.npy"))


def summary(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def saved_residuals(folder, workers):
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    return [checkpointer.read(newest, worker=worker).exchange for worker in range(workers)]


def restored_residuals(folder, workers):
    return [dict(np.load(folder / f"restored-{workers}-{worker}.npz")) for worker in range(workers)]


@pytest.mark.parametrize(("most", "least"), [(3, 2), pytest.param(4, 3, marks=pytest.mark.proof)])
def test_a_worker_less_and_back(tmp_path, most, least):
    changing, steady = tmp_path / "changing", tmp_path / "steady"
    train(steady, most)
    kept, workers_before = [], 0
    for workers, stop_after in ((most, 7), (least, 6), (most, 0)):  # in the middle of the second and of the third epoch
        train(changing, workers, stop_after)
        if kept:
            handed_over = total_pending(restored_residuals(changing, workers))
            np.testing.assert_allclose(
                handed_over, total_pending(kept), rtol=1e-6, atol=1e-6 * np.abs(handed_over).max()
            )
            assert len(kept) == workers_before != workers
        kept, workers_before = saved_residuals(changing, workers), workers
    assert np.abs(total_pending(kept)).max() > 0
    np.testing.assert_array_equal(seen_by_chief(steady), elastic.EPOCHS)
    np.testing.assert_array_equal(seen_by_chief(changing), elastic.EPOCHS)
    assert summary(changing)["steps"] == summary(steady)["steps"]
    assert summary(changing)["restarts"] == 0
    # The batches and their order are the same; only what int4 keeps back differs.
    assert abs(summary(changing)["eval"]["loss"] / summary(steady)["eval"]["loss"] - 1) < 0.02

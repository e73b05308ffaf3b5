"""Residuals of runs whose batches differ in size: what is applied and what is pending are the mean gradients."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tests.integration.scripts.short_batches import RATE
from tests.integration.test_multi_worker import launch

import numpy as np

SMALL = "min_elements=100"
# A bucket whose sums come after the sidecar; two that leave before it is known.
LATE = {"exchange": f"topk:0.05,{SMALL}", "jit_compile": "true"}
EARLY = {"exchange": f"topk:0.05,{SMALL},bucket_bytes=6400", "jit_compile": "false"}
SHARDED = {"exchange": f"int2:{SMALL}", "shard": "optimizer", "jit_compile": "true"}
SCATTERED = {"exchange": f"int2:{SMALL}", "shard": "gradients", "jit_compile": "false"}


def trained(folder: pathlib.Path, *cases: dict[str, Any]) -> list[list[dict[str, np.ndarray]]]:
    """Weights and states of both workers, for each case."""
    folder.mkdir()
    result = launch(2, "-m", "tests.integration.scripts.short_batches", str(folder), json.dumps(cases), timeout=600.0)
    assert result.returncode == 0, result.stdout + result.stderr
    return [[dict(np.load(folder / f"{case}-{worker}.npz")) for worker in range(2)] for case in range(len(cases))]


def weights_of(workers: list[dict[str, np.ndarray]], *, owned: bool) -> np.ndarray:
    return np.sum([worker["weights"] for worker in workers], axis=0) if owned else workers[0]["weights"]


def pending_of(workers: list[dict[str, np.ndarray]]) -> np.ndarray:
    """In units of the mean of the last step."""
    buckets = []
    while f"{len(buckets)}.worker" in workers[0]:
        number = len(buckets)
        total = np.sum([worker[f"{number}.worker"] for worker in workers], axis=0, dtype=np.float64)
        if f"{number}.owner" in workers[0]:
            total += np.concatenate([worker[f"{number}.owner"] for worker in workers])
        buckets.append(total)
    return np.concatenate(buckets) / workers[0]["examples"]


def test_what_is_applied_and_pending_are_the_mean_gradients(tmp_path):
    """After six steps of 8, 8, 1, 8, 8, 1 examples, in which residuals are many times as large as gradients."""
    names = ("dense", "late", "early", "sharded", "scattered", "stopped", "resumed")
    workdir = {"workdir": str(tmp_path / "run")}
    cases = [{"exchange": "none"}, LATE, EARLY, SHARDED, SCATTERED, {**LATE, **workdir, "stop_after": 2}]
    found = dict(zip(names, trained(tmp_path / "weights", *cases, LATE | workdir), strict=True))
    dense = weights_of(found["dense"], owned=False)
    for name in names[1:5]:
        missing = weights_of(found[name], owned=name in ("sharded", "scattered")) - dense
        pending = RATE * pending_of(found[name])
        assert np.linalg.norm(pending) > 10.0, name
        np.testing.assert_allclose(missing, pending, rtol=1e-4, atol=1e-4, err_msg=name)
    # The short batch comes after the checkpoint.
    for before, after in zip(found["late"], found["resumed"], strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)

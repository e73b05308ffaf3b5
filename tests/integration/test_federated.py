"""The clients of a round are spread over real workers."""

from __future__ import annotations

import json
import pathlib

from tests.integration.test_multi_worker import launch

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.cluster

SCRIPT = "experiments/federated.py"
OPTIONS = (
    *("--dataset=digits", "--model=mlp", "--model_args=widths=[16]", "--clients=40", "--clients_per_round=5"),
    *("--partition=dirichlet:0.5", "--rounds=4", "--eval_every=2", "--averaging=scaffold", "--jit_compile=false"),
    *("--update_codec=int8:min_elements=100", "--stateful_clients", "--seed=3"),
)


def run(workers: int, workdir: pathlib.Path, *options: str) -> dict:
    """The run's summary; empty if it was stopped."""
    result = launch(workers, SCRIPT, *OPTIONS, f"--workdir={workdir}", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = workdir / "summary.json"
    return json.loads(summary.read_text()) if summary.exists() else {}


def test_two_workers_average_what_one_does(tmp_path):
    """To 1e-5, with control variates and residuals, also where the two are stopped and go on."""
    one = run(1, tmp_path / "one")
    assert not run(2, tmp_path / "two", "--stop_after=2")
    two = run(2, tmp_path / "two")
    assert (one["workers"], two["workers"]) == (1, 2)
    models = [keras.saving.load_model(tmp_path / name / "model.keras") for name in ("one", "two")]
    for first, second in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)
    for name, value in one["eval"].items():
        assert two["eval"][name] == pytest.approx(value, abs=1e-4), name
    assert two["federated"] == one["federated"]
    assert two["exchange"]["wire_bytes_per_step"] > 0

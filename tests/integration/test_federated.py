"""The clients of a round are spread over real workers."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
import sys
import time

from tests import nursery
from tests.integration.test_multi_worker import ROOT, launch
from tfpar.checkpoint.format import steps_in

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


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_two_workers_average_what_one_does(tmp_path, stopped):
    """To 1e-5, with control variates and residuals, also where the two are stopped and go on."""
    one = run(1, tmp_path / "one")
    if stopped:
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


@pytest.mark.proof
def test_killed_in_any_round_it_ends_with_the_same_bits(tmp_path):
    """SIGKILL at random moments of five starts; checkpoints of control variates and residuals come after each round."""
    options = (*OPTIONS, "--rounds=30", "--checkpoint_every=1", "--strategy=one_device")
    generator = random.Random(0)
    kills = [generator.uniform(0.0, 0.3) for _ in range(5)]
    summaries = {}
    for name, left in (("undisturbed", []), ("killed", kills)):
        workdir, command = tmp_path / name, [sys.executable, SCRIPT, *options, f"--workdir={tmp_path / name}"]
        while not (workdir / "summary.json").exists():
            with nursery.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
                before = newest(workdir)
                while left and process.poll() is None and newest(workdir) <= before:
                    time.sleep(0.005)
                if left:
                    time.sleep(left.pop())
                    process.kill()
                output = process.communicate()[0].decode()
            assert process.returncode in (0, -9), output
        summaries[name] = json.loads((workdir / "summary.json").read_text())
    assert not kills
    assert summaries["killed"]["params_sha256"] == summaries["undisturbed"]["params_sha256"]
    assert summaries["killed"]["federated"] == summaries["undisturbed"]["federated"]


def newest(workdir: pathlib.Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max(steps_in(workdir / "checkpoints"), default=0)

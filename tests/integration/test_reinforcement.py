"""Acting on real workers: environments are split over them, and every exchange carries the gradients."""

from __future__ import annotations

import json
import pathlib

from tests.integration.test_multi_worker import launch

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.cluster

SCRIPT = "experiments/reinforcement.py"
OPTIONS = (
    *("--env=CartPole-v1", "--environments=8", "--rollout_steps=8", "--minibatches=2", "--rollout_epochs=2"),
    *("--hidden=8", "--eval_episodes=4", "--eval_every=1000", "--steps=20", "--jit_compile=false", "--seed=3"),
)


def run(workers: int, workdir: pathlib.Path, *options: str) -> tuple[dict, str]:
    """The run's summary (empty if it was stopped), and its output."""
    result = launch(workers, SCRIPT, *OPTIONS, f"--workdir={workdir}", *options)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    summary = workdir / "summary.json"
    return json.loads(summary.read_text()) if summary.exists() else {}, output


def test_two_workers_learn_what_one_does_with_twice_the_environments(tmp_path):
    """To 1e-4 over 20 steps."""
    one, _ = run(1, tmp_path / "one")
    two, output = run(2, tmp_path / "two")
    assert "8 environments, 4 on each of 2 replicas" in output
    assert (one["workers"], two["workers"]) == (1, 2)
    models = [keras.saving.load_model(tmp_path / name / "model.keras") for name in ("one", "two")]
    for first, second in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-4)
    assert two["eval"]["return"] == pytest.approx(one["eval"]["return"])


@pytest.mark.proof
def test_two_workers_that_are_stopped_within_a_round_end_with_the_same_bits(tmp_path):
    two, _ = run(2, tmp_path / "two")
    run(2, tmp_path / "cut", "--stop_after=10")
    resumed, output = run(2, tmp_path / "cut")
    assert "the episodes continue where they stopped" in output
    assert resumed["params_sha256"] == two["params_sha256"]


def test_gradients_travel_compressed(tmp_path):
    """The run itself compares the weights of the workers. They act in Gymnasium and evaluate there together."""
    options = ("--env=gym:CartPole-v1", "--exchange=int8:min_elements=1", "--hidden=64", "--steps=8")
    summary, output = run(2, tmp_path, *options)
    assert "gym:CartPole-v1: observations [4], one of 2 actions" in output
    assert summary["eval"]["return"] > 7.0
    assert summary["exchange"]["codec"].startswith("int8")
    assert summary["exchange"]["wire_bytes_per_step"] < summary["exchange"]["dense_wire_bytes_per_step"]

"""Local steps of workers that hold replicas between them: the weights of whole replicas, and what resumes where."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

from tests.integration.scripts.local_steps import STEPS
from tests.integration.test_local_steps import INT4, ROUNDS, STREAMED, Case, assert_close, on_workers
from tests.integration.test_multi_worker import launch

import numpy as np
import pytest

WORKERS = 4
MODEL = {"mesh": "data:2,model:2", "devices": 1, "pair": True}
PIPELINE = {"mesh": "data:2,pipeline:2", "devices": 1, "pair": True}
ENCODED = {**INT4, "exchange": "int4:min_elements=64"}
PLAIN = {"local_steps": 4, "outer_optimizer": "nesterov"}
FRAGMENTS = {**ROUNDS, "outer_fragments": 2, "outer_delay": 1, "outer_own_share": 0.3}
BAD = {**FRAGMENTS, "bad": 3, "bn": False, "pair": False}  # tanh would keep it finite


def on_mesh(folder: pathlib.Path, mesh: dict[str, Any], cases: dict[str, dict[str, Any]]) -> dict[str, Case]:
    return on_workers(folder, {name: {**mesh, **options} for name, options in cases.items()}, WORKERS)


def resumed(folder: pathlib.Path, encoded: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """A run, and one that goes on from its checkpoint within a round."""
    whole = {**encoded, "workdir": str(folder / f"{name} whole"), "checkpoint_every": 6, "keep_checkpoints": STEPS}
    return {
        f"{name} whole": whole,
        f"{name} resumed": {**encoded, "workdir": str(folder / name), "takes_over": (6, whole["workdir"])},
    }


@pytest.fixture(scope="module")
def divided(tmp_path_factory) -> dict[str, Case]:
    """Two replicas, of two workers that divide the layers each."""
    folder = tmp_path_factory.mktemp("model")
    return on_mesh(folder, MODEL, resumed(folder, {**STREAMED, **ENCODED}, "streamed"))


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> dict[str, Case]:
    """Runs that stopped between two rounds, and within one."""
    folder = tmp_path_factory.mktemp("left")
    stops = {name: {**PLAIN, "workdir": str(folder / name)} for name in ("ended", "within")}
    cases = {"ended": stops["ended"] | {"stop_after": 8}, "within": stops["within"] | {"stop_after": 6}}
    return on_mesh(folder, MODEL, cases | {"at once": PLAIN} | resumed(folder, ENCODED, "encoded"))


@pytest.fixture(scope="module")
def whole_replicas(tmp_path_factory) -> dict[str, Case]:
    """Two workers with a replica each."""
    return on_workers(tmp_path_factory.mktemp("whole"), {"rounds": ROUNDS, "fragments": FRAGMENTS})


def check_same(found: Case, expected: Case) -> None:
    assert_close(found.weights, expected.weights, 1e-4)
    assert found.summary["rounds"] == expected.summary["rounds"] == 4
    for mine, theirs in zip(found.workers[0]["seen"], expected.workers[0]["seen"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0.0, atol=1e-4)  # the outer weights, also within a round
    assert found.summary["eval"]["loss"] == pytest.approx(expected.summary["eval"]["loss"], rel=1e-4)
    assert found.summary["train_loss"] == pytest.approx(expected.summary["train_loss"], rel=1e-4)


def check_resumed(cases: dict[str, Case], name: str) -> None:
    again, at_once = cases[f"{name} resumed"], cases[f"{name} whole"]
    assert again.summary["params_sha256"] == at_once.summary["params_sha256"]
    assert (len(again.workers[0]["seen"]), len(at_once.workers[0]["seen"])) == (4, 7)  # every other step, from 6 or 0
    for weight in at_once.weights:
        for worker in range(WORKERS):
            mine, theirs = (case.workers[worker][weight] for case in (again, at_once))
            np.testing.assert_array_equal(mine, theirs, err_msg=weight)
            np.testing.assert_array_equal(mine, at_once.workers[0][weight], err_msg=weight)


@pytest.mark.cluster
def test_workers_that_divide_layers_between_them(divided):
    """With int4, a run that resumes within a round, while a fragment travels, has the same bits."""
    check_resumed(divided, "streamed")


@pytest.mark.proof
@pytest.mark.cluster
def test_a_replica_leaves_out_its_own_bad_step_alone(tmp_path):
    """As a whole replica does, with fragments and clipping."""
    bad, expected = on_mesh(tmp_path / "mesh", MODEL, {"bad": BAD})["bad"], on_workers(tmp_path, {"bad": BAD})["bad"]
    check_same(bad, expected)
    assert 1 <= bad.summary["skipped_steps"] == expected.summary["skipped_steps"] <= 3
    for name in bad.weights:
        assert np.isfinite(bad.workers[0][name]).all(), name
        for worker in range(1, WORKERS):
            np.testing.assert_array_equal(bad.workers[worker][name], bad.workers[0][name], err_msg=name)


@pytest.mark.proof
@pytest.mark.cluster
def test_layers_that_workers_divide_learn_as_those_of_whole_replicas(whole_replicas, tmp_path):
    """With an outer optimizer and clipping, with and without fragments."""
    found = on_mesh(tmp_path, MODEL, {"rounds": ROUNDS, "fragments": FRAGMENTS})
    for kind in ("rounds", "fragments"):
        check_same(found[kind], whole_replicas[kind])


@pytest.mark.proof
@pytest.mark.cluster
def test_a_round_resumes_with_the_same_bits(left):
    check_resumed(left, "encoded")


@pytest.mark.proof
@pytest.mark.cluster
def test_fewer_replicas_end_the_round_of_all(left, tmp_path):
    """As fewer whole replicas do."""
    run = {**PLAIN, "pair": True, "workdir": str(tmp_path / "run")}
    on_workers(tmp_path, {"stopped": run | {"stop_after": 6}}, 2)
    expected = on_workers(tmp_path, {"fewer": run}, 1)["fewer"]
    within = shutil.copytree(left["folder"] / "within", tmp_path / "within")
    found = on_workers(tmp_path, {"fewer": {**PLAIN, **MODEL, "mesh": "model:2", "workdir": str(within)}}, 2)["fewer"]
    assert_close(found.weights, expected.weights, 1e-4)
    assert found.summary["rounds"] == expected.summary["rounds"]


@pytest.mark.proof
@pytest.mark.cluster
def test_pipelines_between_workers(left, whole_replicas, tmp_path):
    """And a run of the other mesh continues here between two rounds, but not within one."""
    cases = {"rounds": ROUNDS, "fragments": FRAGMENTS, "moved": {**PLAIN, "workdir": str(left["folder"] / "ended")}}
    cases |= resumed(tmp_path, ENCODED, "encoded") | resumed(tmp_path, {**STREAMED, **ENCODED}, "streamed")
    found = on_mesh(tmp_path, PIPELINE, cases)
    for kind in ("rounds", "fragments"):
        check_same(found[kind], whole_replicas[kind])
    for kind in ("encoded", "streamed"):
        check_resumed(found, kind)
    assert (found["moved"].summary["rounds"], found["moved"].summary["steps"]) == (4, 14)
    assert_close(found["moved"].weights, left["at once"].weights, 1e-4)
    other = json.dumps([{**PLAIN, **PIPELINE, "workdir": str(left["folder"] / "within")}])
    refused = launch(WORKERS, "-m", "tests.integration.scripts.local_steps", str(tmp_path), other)
    assert refused.returncode != 0
    assert "within a round of 4 workers, 2 of which held a replica between them" in refused.stdout

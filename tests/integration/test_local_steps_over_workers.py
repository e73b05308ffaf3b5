"""Local steps of workers that hold replicas between them: the weights of whole replicas, and what resumes where."""

from __future__ import annotations

import json
import pathlib
from typing import Any

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


def cases_of(folder: pathlib.Path, mesh: dict[str, Any], **more: dict[str, Any]) -> dict[str, Case]:
    """The cases of both meshes, and more."""
    cases = {"rounds": ROUNDS, "fragments": FRAGMENTS, **more}
    for name, encoded in (("", ENCODED), ("streamed_", {**STREAMED, **ENCODED})):
        left = {**encoded, "workdir": str(folder / f"{name}left")}
        cases |= {f"{name}whole": encoded, f"{name}stopped": left | {"stop_after": 6}, f"{name}resumed": left}
    return on_workers(folder, {name: {**mesh, **options} for name, options in cases.items()}, WORKERS)


@pytest.fixture(scope="module")
def divided(tmp_path_factory) -> dict[str, Case]:
    """Two replicas, of two workers that divide the layers each."""
    folder = tmp_path_factory.mktemp("model")
    ended = {**PLAIN, "workdir": str(folder / "ended"), "stop_after": 8}
    within = {**PLAIN, "workdir": str(folder / "within"), "stop_after": 6}
    bad = {"local_steps": 4, "bad": 3, "bn": False, "pair": False}  # tanh would keep it finite
    return cases_of(folder, MODEL, bad=bad, ended=ended, within=within)


@pytest.fixture(scope="module")
def whole_replicas(tmp_path_factory) -> dict[str, Case]:
    """Two workers with a replica each."""
    return on_workers(tmp_path_factory.mktemp("whole"), {"rounds": ROUNDS, "fragments": FRAGMENTS})


def check(divided: dict[str, Case], whole: dict[str, Case]) -> None:
    for kind in ("rounds", "fragments"):
        found, expected = divided[kind], whole[kind]
        assert_close(found.weights, expected.weights, 1e-4)
        assert found.summary["rounds"] == expected.summary["rounds"] == 4
        for mine, theirs in zip(found.workers[0]["seen"], expected.workers[0]["seen"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0.0, atol=1e-4)  # the outer weights, also within a round
        assert found.summary["eval"]["loss"] == pytest.approx(expected.summary["eval"]["loss"], rel=1e-4)
        assert found.summary["train_loss"] == pytest.approx(expected.summary["train_loss"], rel=1e-4)
    for kind in ("", "streamed_"):
        resumed, at_once = divided[f"{kind}resumed"], divided[f"{kind}whole"]
        assert resumed.summary["params_sha256"] == at_once.summary["params_sha256"]
        for name in at_once.weights:
            for worker in range(WORKERS):
                mine, theirs = (case.workers[worker][name] for case in (resumed, at_once))
                np.testing.assert_array_equal(mine, theirs, err_msg=name)
                np.testing.assert_array_equal(mine, at_once.workers[0][name], err_msg=name)


@pytest.mark.cluster
def test_workers_that_divide_layers_between_them(divided, whole_replicas):
    """With an outer optimizer and clipping, with and without fragments; with int4, a run that resumes within a round,
    while a fragment travels, has the same bits."""
    check(divided, whole_replicas)


@pytest.mark.cluster
def test_a_replica_leaves_out_its_own_bad_step_alone(divided):
    bad = divided["bad"]
    assert 1 <= bad.summary["skipped_steps"] <= 3
    assert bad.summary["rounds"] == 4
    for name in bad.weights:
        assert np.isfinite(bad.workers[0][name]).all(), name
        for worker in range(1, WORKERS):
            np.testing.assert_array_equal(bad.workers[worker][name], bad.workers[0][name], err_msg=name)


@pytest.mark.proof
@pytest.mark.cluster
def test_pipelines_between_workers(divided, whole_replicas, tmp_path):
    """And a run of the other mesh continues here between two rounds, but not within one."""
    moved = {**PLAIN, "workdir": str(divided["folder"] / "ended")}
    found = cases_of(tmp_path, PIPELINE, moved=moved)
    check(found, whole_replicas)
    assert found["moved"].summary["rounds"] == 4
    assert found["moved"].summary["steps"] == 14
    other = json.dumps([{**PLAIN, **PIPELINE, "workdir": str(divided["folder"] / "within")}])
    refused = launch(WORKERS, "-m", "tests.integration.scripts.local_steps", str(tmp_path), other)
    assert refused.returncode != 0
    assert "within a round of 4 workers, 2 of which held a replica between them" in refused.stdout

"""Local steps on real workers: data parallelism as the limit, resuming within a round, what hooks and files see."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from tests.integration.scripts import local_steps
from tests.integration.test_multi_worker import launch
from tests.training.layouts import weights_of
from tfpar.checkpoint import checkpointer
from tfpar.config import ConfigError, ExperimentConfig, StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology
from tfpar.training.validate import validate_config

import numpy as np
import pytest

WORKERS = 2
SINGLE = {"outer_optimizer": "sgd", "bn": False}
INT4 = {"local_steps": 4, "exchange": "int4", "optimizer": "adamw", "optimizer_args": ""}
TIMED = {"round_seconds": 0.3, "slow": 0.1, "steps": 20, "eval_every": 10, "look_every": 10}
ROUNDS = {"local_steps": 4, "optimizer": "adamw", "optimizer_args": "", "clip_norm": 0.5, "pair": True}
MESH = {"mesh": "data:2,model:2", "devices": 2, "pair": True}
STREAMED = {**INT4, "outer_fragments": 2, "outer_delay": 1}


class Case:
    """One case on all workers.

    Attributes:
      workers: Arrays of each worker: weights, and what hooks saw.
      summary: That of worker 0.
    """

    def __init__(self, folder: pathlib.Path, number: int, workers: int) -> None:
        self.workers = [dict(np.load(folder / f"{number}-{worker}.npz")) for worker in range(workers)]
        self.summary = json.loads((folder / f"{number}-0.json").read_text())

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in self.workers[0].items() if name not in ("seen", "losses")}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Case]:
    """Cases in one cluster, which takes most of the time to start."""
    folder = tmp_path_factory.mktemp("local_steps")
    return on_workers(
        folder,
        {
            "single": {**SINGLE, "jit_compile": "true"},
            "whole": INT4,
            "left": {"local_steps": 4, "outer_optimizer": "sgd", "stop_after": 6, "workdir": str(folder / "left")},
            "rounds": ROUNDS,
        },
    )


@pytest.fixture(scope="module")
def further(tmp_path_factory) -> dict[str, Case]:
    """Cases of the proofs."""
    folder = tmp_path_factory.mktemp("local_steps")
    left = {"local_steps": 4, "outer_fragments": 2, "outer_optimizer": "sgd", "stop_after": 6}
    return on_workers(
        folder,
        {
            "whole": INT4,
            "stopped": {**INT4, "stop_after": 6, "workdir": str(folder / "run")},
            "resumed": {**INT4, "workdir": str(folder / "run")},
            "bad": {"local_steps": 4, "bad": 3, "bn": False},
            "streamed": STREAMED,
            "streamed_stopped": {**STREAMED, "stop_after": 6, "workdir": str(folder / "streamed")},
            "streamed_resumed": {**STREAMED, "workdir": str(folder / "streamed")},
            "hook": {"local_steps": 4, "stop_at": 6},
            "streamed_left": {**left, "workdir": str(folder / "streamed_left")},
            "streamed_hook": {**STREAMED, "stop_at": 6},
            "timed_stopped": {**TIMED, "stop_after": 10, "workdir": str(folder / "timed")},
            "timed_resumed": {**TIMED, "workdir": str(folder / "timed")},
            "auto": {"local_steps": "auto", "steps": 40},
        },
    )


def on_workers(folder: pathlib.Path, options: dict[str, dict[str, Any]], workers: int = WORKERS) -> dict[str, Case]:
    """What each case leaves, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    result = launch(
        workers,
        "-m",
        "tests.integration.scripts.local_steps",
        str(folder),
        json.dumps([*options.values()]),
        timeout=900.0,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    cases = {name: Case(folder, number, workers) for number, name in enumerate(options)}
    return cases | {"folder": folder}  # type: ignore


def here(strategy: str, devices: int = 0, **options: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Trains in this process."""
    runtime = strategies.build(choose_topology(StrategyConfig(strategy=strategy, devices=devices)))
    trainer, seen = local_steps.train({"strategy": strategy, "devices": devices, **options}, runtime)
    return weights_of(trainer), seen


@functools.cache
def on_one_device() -> dict[str, np.ndarray]:
    return here("one_device", bn=False)[0]


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], atol: float) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0.0, atol=atol, err_msg=name)


@pytest.mark.cluster
def test_rounds_of_one_step_are_data_parallelism(cases):
    """Inner SGD, outer SGD of rate 1, uneven batches: the weights of one device."""
    assert_close(cases["single"].weights, on_one_device(), 1e-6)
    summary = cases["single"].summary
    assert summary["rounds"] == summary["steps"] == local_steps.STEPS


@pytest.mark.cluster
def test_workers_that_divide_their_replicas(cases, tmp_path):
    """Rounds with the weights of whole replicas, also where the run was stopped within one."""
    run = {**ROUNDS, **MESH, "workdir": str(tmp_path / "run")}
    found = on_workers(tmp_path, {"stopped": {**run, "stop_after": 6}, "resumed": run})
    assert found["stopped"].summary["steps"] == 6
    assert_close(found["resumed"].weights, cases["rounds"].weights, 1e-4)
    assert found["resumed"].summary["rounds"] == cases["rounds"].summary["rounds"]


@pytest.mark.proof
@pytest.mark.cluster
def test_workers_that_divide_their_replicas_resume_with_the_same_bits(tmp_path):
    """With int4, within a round; and where other devices have the parts, not at all."""
    encoded = {**INT4, **MESH, "exchange": "int4:min_elements=64"}
    left = {**encoded, "workdir": str(tmp_path / "run")}
    found = on_workers(tmp_path, {"whole": encoded, "stopped": {**left, "stop_after": 6}})
    other = json.dumps([{**left, "mesh": "data:2,pipeline:2"}])
    refused = launch(WORKERS, "-m", "tests.integration.scripts.local_steps", str(tmp_path), other)
    assert "--mesh: the devices of the saved run had other layers or other parts of them" in refused.stdout
    found |= on_workers(tmp_path, {"resumed": left})
    assert found["resumed"].summary["params_sha256"] == found["whole"].summary["params_sha256"]
    for mine, theirs in zip(found["resumed"].workers, found["whole"].workers, strict=True):
        for name in found["whole"].weights:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


def test_replicas_of_a_worker_stay_in_step():
    assert_close(here("mirrored", 2, **SINGLE)[0], on_one_device(), 1e-6)
    assert_close(here("mirrored", 2, bn=False, local_steps=5, outer_optimizer="sgd")[0], on_one_device(), 1e-6)


@pytest.mark.proof
@pytest.mark.cluster
def test_a_run_resumed_within_a_round_has_the_same_bits(further):
    whole, stopped, resumed = further["whole"], further["stopped"], further["resumed"]
    assert (stopped.summary["rounds"], stopped.summary["steps"]) == (1, 6)
    assert resumed.summary["rounds"] == whole.summary["rounds"] == 4  # the last ends with the run
    assert resumed.summary["params_sha256"] == whole.summary["params_sha256"]
    assert resumed.summary["eval"] == whole.summary["eval"]
    for mine, theirs in zip(resumed.workers, whole.workers, strict=True):
        for name in whole.weights:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
        np.testing.assert_array_equal(np.concatenate([stopped.workers[0]["seen"], mine["seen"]]), theirs["seen"])


@pytest.mark.proof
@pytest.mark.cluster
def test_a_run_resumed_with_a_fragment_in_flight_has_the_same_bits(further):
    whole, stopped, resumed = (further[name] for name in ("streamed", "streamed_stopped", "streamed_resumed"))
    assert resumed.summary["rounds"] == whole.summary["rounds"] == 4
    assert resumed.summary["params_sha256"] == whole.summary["params_sha256"]
    assert resumed.summary["eval"] == whole.summary["eval"]
    for mine, theirs in zip(resumed.workers, whole.workers, strict=True):
        for name in whole.weights:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
        np.testing.assert_array_equal(np.concatenate([stopped.workers[0]["seen"], mine["seen"]]), theirs["seen"])
    first, second = whole.workers
    for name in whole.weights:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    assert any(np.any(further["whole"].weights[name] != whole.weights[name]) for name in whole.weights)


@pytest.mark.proof
@pytest.mark.cluster
def test_another_number_of_workers_goes_on_with_a_fragment_in_flight(further):
    saved = checkpointer.Checkpointer(further["folder"] / "streamed_left", worker=1).exchange_state(6, 1)
    assert saved["local/flight/0/due"] == 8  # it left at step 6
    options = {"local_steps": 4, "outer_fragments": 2, "outer_optimizer": "sgd"}
    options |= {"workdir": str(further["folder"] / "streamed_left"), "learning_rate": 0.05}
    found, seen = here("one_device", **options)
    assert seen["summary"]["steps"] == local_steps.STEPS
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.proof
@pytest.mark.cluster
def test_a_hook_that_stops_ends_what_travels(further):
    hook = further["streamed_hook"]
    assert hook.summary["steps"] == 6
    first, second = hook.workers
    for name in hook.weights:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.cluster
def test_hooks_and_evaluation_see_the_outer_weights(cases):
    """At steps 2, 4, ... of rounds of four: what they see changes when a round ends, on all workers alike."""
    first, second = cases["whole"].workers
    np.testing.assert_array_equal(first["seen"], second["seen"])
    changed = [bool(np.any(after != before)) for before, after in zip(first["seen"], first["seen"][1:], strict=False)]
    assert changed == [True, False, True, False, True, True]
    losses = first["losses"]
    assert losses[1] == losses[2] != losses[3] == losses[4] != losses[5] != losses[6]
    # In a ring of two each sends all that is dense: 2,019 weights and the share; and of a round and a step its reports.
    assert cases["single"].summary["exchange"]["wire_bytes_per_step"] == 4 * (2019 + 1) + 24 + 32
    exchange = cases["whole"].summary["exchange"]
    assert exchange["wire_bytes_per_step"] < exchange["dense_wire_bytes_per_step"] / 9  # 4 rounds of int4 in 14 steps


@pytest.mark.cluster
def test_other_workers_end_the_round_with_the_parts_of_all(cases, tmp_path):
    """One worker goes on from what two had saved within a round: nothing that they had moved is lost."""
    left = cases["folder"] / "left"
    checkpoint = checkpointer.find(left)
    files = [checkpointer.Checkpointer(left, worker=rank).exchange_state(6, rank) for rank in range(WORKERS)]
    rows = [state["local/round"] for state in files]
    assert [row[0] for row in rows] == [2.0, 2.0]
    assert sum(row[1] for row in rows) == 10 + 16  # the last batch of the first epoch, and a whole one
    names = [name for name in checkpoint.run["variables"] if name.startswith("model/") and "seed" not in name]
    kernel = next(place for place, name in enumerate(names) if name.endswith("first/kernel"))
    inner = sum(row[1] * state[f"local/inner/{kernel}"] for row, state in zip(rows, files, strict=True))
    expected = inner / sum(row[1] for row in rows)
    assert not np.allclose(files[0][f"local/inner/{kernel}"], files[1][f"local/inner/{kernel}"], atol=1e-5)
    options = {"local_steps": 4, "outer_optimizer": "sgd", "workdir": str(left), "steps": 7, "learning_rate": 0.05}
    found, seen = here("one_device", **options)
    assert seen["summary"]["rounds"] == 3  # one of two workers, the one that they had begun, and the last
    moved = np.abs(found[next(name for name in found if name.endswith("first/kernel"))] - expected).max()
    assert 0.0 < moved < 0.02  # by a single step


@pytest.mark.proof
@pytest.mark.cluster
def test_a_worker_leaves_out_its_own_bad_step_alone(further):
    bad, (first, second) = further["bad"], further["bad"].workers
    for name in bad.weights:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        assert np.isfinite(first[name]).all(), name
    epochs = -(-local_steps.STEPS * local_steps.BATCH // local_steps.EXAMPLES)
    assert 1 <= bad.summary["skipped_steps"] <= epochs
    assert np.isfinite(bad.summary["train_loss"])
    assert bad.summary["rounds"] == 4


@pytest.mark.proof
@pytest.mark.cluster
def test_a_hook_that_stops_within_a_round_ends_it(further):
    hook = further["hook"]
    assert (hook.summary["rounds"], hook.summary["steps"]) == (2, 6)
    first, second = hook.workers
    for name in hook.weights:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    flat = np.concatenate([value.ravel() for value in hook.weights.values()])
    assert np.any(flat != first["seen"][-1])  # the hook saw the weights of before
    assert hook.summary["eval"]["loss"] != first["losses"][-1]


@pytest.mark.proof
@pytest.mark.cluster
def test_workers_agree_on_the_measured_length_of_rounds(further):
    auto = further["auto"]
    assert auto.summary["steps"] == 40
    assert auto.summary["local_steps"] >= 1
    first, second = auto.workers
    for name in auto.weights:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_a_resumed_run_keeps_the_measured_length_of_rounds(tmp_path, caplog):
    """Measured after three rounds of 10 steps; then recorded, and not measured again."""
    options = {"local_steps": "auto", "workdir": str(tmp_path), "steps": 50, "bn": False}
    _, stopped = here("one_device", **options, stop_after=32)
    chosen = stopped["summary"]["local_steps"]
    assert checkpointer.Checkpointer(tmp_path).exchange_state(32, 0)["local/steps"] == chosen
    # Measured again, exchanges that take nearly no share of the time would make rounds of another length.
    _, resumed = here("one_device", **options, outer_time_share=0.001)
    assert resumed["summary"]["local_steps"] == chosen
    assert resumed["summary"]["steps"] == 50


@pytest.mark.proof
@pytest.mark.cluster
def test_a_fast_worker_takes_more_steps_in_a_round(further):
    """Worker 1 needs 0.1 s a step more, and rounds of 0.3 s end at steps 10 and 20 of the run at the latest."""
    for name, step in (("timed_stopped", 10), ("timed_resumed", 20)):
        timed = further[name]
        assert timed.summary["steps"] == step
        first, second = timed.workers
        for weight in timed.weights:
            np.testing.assert_array_equal(first[weight], second[weight], err_msg=weight)
        saved = checkpointer.Checkpointer(further["folder"] / "timed", worker=1).exchange_state(20, 1)
        taken = saved["local/taken"]
        assert taken.sum() // 2 == 20  # the step of the run
        assert taken[0] > taken[1] >= 2
    assert further["timed_resumed"].summary["rounds"] > further["timed_stopped"].summary["rounds"]
    assert np.isfinite(further["timed_resumed"].summary["train_loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 5}, r"--round_seconds=2 does not work with --local_steps=5: a round has either"),
        ({"local_steps": "auto"}, r"--round_seconds=2 does not work with --local_steps=auto"),
        ({"outer_fragments": 2}, r"--outer_fragments=2 does not work with --round_seconds=2"),
        ({"stall_timeout": 2.0}, r"--round_seconds=2 does not work with --stall_timeout=2: .* --stall_timeout=4"),
    ],
)
def test_what_rounds_of_a_given_time_cannot_have_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        validate_config(ExperimentConfig.from_flat_dict({"dataset": "digits", "round_seconds": 2.0, **options}))

"""A worker that keeps failing is left out, and the GPU that it had is no longer used."""

from __future__ import annotations

import re

from tests.launch.actors import Actors, lines_of
from tfpar.launch import gpu_slots

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]


def test_a_worker_that_keeps_failing_is_left_out(actors: Actors) -> None:
    result = actors.run("--workers=3 --min_workers=2 --max_restarts=5 --restart_delay=0", "worker2=exit:4")
    assert result.returncode == 0, result.stdout
    said = lines_of(result.stdout, "launch")
    assert said[0] == "worker 2 failed with exit code 4; restart 1 of 5"
    assert said[1] == "worker 2 failed with exit code 4; restart 2 of 5"
    assert said[2] == "continuing with 2 workers, without worker 2"
    assert said[3].startswith("2 workers: done in ")


def test_the_failing_gpu_is_no_longer_used(actors: Actors) -> None:
    actors.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"
    result = actors.run("--workers=4 --min_workers=2 --max_restarts=5 --restart_delay=0", "all=fail_on_gpu:5,describe")
    assert result.returncode == 0, result.stdout
    last = [line for line in result.stdout.splitlines() if "CUDA_VISIBLE" in line][-3:]
    assert {tuple(re.findall(r"worker (\d).*=(\d)", line)[0]) for line in last} == {("0", "4"), ("1", "6"), ("2", "7")}
    said = lines_of(result.stdout, "launch")
    assert said[2] == "continuing with 3 workers, without worker 1 (GPU 5); workers 2 to 3 are now workers 1 to 2"
    assert said[3].startswith("3 workers: done in ")


def test_the_processes_know_that_one_is_left_out(actors: Actors) -> None:
    result = actors.run(
        "--workers=2 --min_workers=1 --max_restarts=5 --restart_delay=0",
        "worker0=show:TFPAR_LEFT_OUT",
        "worker1=exit:4",
    )
    assert lines_of(result.stdout, "worker 0") == ["TFPAR_LEFT_OUT=0", "TFPAR_LEFT_OUT=0", "TFPAR_LEFT_OUT=1"]


def test_what_happens_to_several_is_no_workers_fault(actors: Actors) -> None:
    result = actors.run(
        "--workers=3 --min_workers=1 --max_restarts=3 --restart_delay=0",
        "worker0=sleep:900",
        "worker1=exit:4",  # always the first
        "worker2=sleep:0.3,exit:4",
    )
    assert result.returncode == 4
    assert "continuing with" not in result.stdout


def test_no_fewer_than_min_workers(actors: Actors) -> None:
    result = actors.run("--workers=2 --min_workers=2 --max_restarts=3 --restart_delay=0", "worker1=exit:4")
    assert result.returncode == 4
    assert "continuing with" not in result.stdout


def four(least: int = 1) -> gpu_slots.Slots:
    return gpu_slots.Slots(4, list("0123"), least=least)


def test_the_suspects_slot_is_left_out_with_its_gpu() -> None:
    workers = four()
    assert workers.failed(1, 5.0, alone=True) == ""
    assert workers.failed(1, 5.0, alone=True).startswith("continuing with 3 workers, without worker 1 (GPU 1)")
    assert (workers.gpus, workers.workers, workers.left_out) == (["0", "2", "3"], 3, 1)
    assert workers.failed(1, 5.0, alone=True) == ""  # another slot by now
    assert workers.failed(1, 5.0, alone=True).endswith("without worker 1 (GPU 2); worker 2 is now worker 1")
    assert workers.gpus == ["0", "3"]


def test_unrelated_failures_leave_nobody_out() -> None:
    workers = four()
    for worker, ran, alone in ((1, 5.0, True), (1, gpu_slots.TRUSTED_S, True), (2, 5.0, True), (1, 5.0, True)):
        assert workers.failed(worker, ran, alone=alone) == ""
    for worker, alone in ((3, False), (1, True), (3, False), (1, True)):  # never twice in a row
        assert workers.failed(worker, 5.0, alone=alone) == ""
    assert workers.workers == 4


def test_enough_workers_stay() -> None:
    workers = four(least=4)
    assert [workers.failed(3, 5.0, alone=True) for _ in range(3)] == [""] * 3
    workers = four(least=0)
    assert [workers.failed(3, 5.0, alone=True) for _ in range(3)] == [""] * 3


def test_left_out_without_gpus() -> None:
    workers = gpu_slots.Slots(2, [], least=1)
    assert workers.gpus == []
    said = [workers.failed(1, 5.0, alone=True) for _ in range(2)]
    assert said == ["", "continuing with 1 worker, without worker 1"]
    assert (workers.gpus, workers.workers) == ([], 1)

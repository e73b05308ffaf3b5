"""What each process gets when it starts: its place in the cluster, its port, and its share of cores and GPUs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.launch.actors import ROOT, SCRIPTS, Actors, lines_of
from tfpar.config import ConfigError
from tfpar.launch import cli as launch
from tfpar.launch import gpu_slots
from tfpar.process.cores import share_out
from tfpar.process.exit_codes import SHARED_GPUS

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]


def test_every_process_knows_its_place(actors: Actors) -> None:
    result = actors.run(
        "--workers=2 --ps=1",
        "all=describe",
        "ps=touch:shown,sleep:900",
        "chief=wait_for:shown",
        "worker=wait_for:shown",
    )
    assert result.returncode == 0, result.stdout
    members = "1 chief, 2 worker, 1 ps (TF_CONFIG)"
    for label, rank, is_chief in (
        ("chief 0", 0, True),
        ("worker 0", 1, False),
        ("worker 1", 2, False),
        ("ps 0", -1, False),
    ):
        place, restarts, *_ = lines_of(result.stdout, label)
        assert place.startswith(f"{label} of {members} rank={rank} chief={is_chief} at=127.0.0.1:")
        assert restarts == "TFPAR_RESTARTS=0"


def test_cores_are_shared_out_unless_the_user_says_otherwise(actors: Actors) -> None:
    cores = len(os.sched_getaffinity(0))
    result = actors.run("--workers=2", "worker0=describe")
    assert f"TF_NUM_INTRAOP_THREADS={max(1, cores // 2)}" in lines_of(result.stdout, "worker 0")
    actors.environ["TF_NUM_INTRAOP_THREADS"] = "7"
    result = actors.run("--workers=2", "worker0=describe")
    assert "TF_NUM_INTRAOP_THREADS=7" in lines_of(result.stdout, "worker 0")


def test_every_worker_has_cores_of_its_own_unless_they_are_shared(actors: Actors) -> None:
    usable = sorted(os.sched_getaffinity(0))
    own = share_out(2)  # none on a machine with a single core
    for flags, expected in (
        ("--workers=2", [sorted(each) for each in own] or [usable, usable]),
        ("--workers=2 --share_cores", [usable, usable]),
    ):
        result = actors.run(flags, "all=describe")
        listed = json.dumps([] if "share" in flags else own)
        for index, cores in enumerate(expected):
            assert f"cores: {cores} of {listed}" in lines_of(result.stdout, f"worker {index}")


def test_with_parameter_servers_all_use_all_cores(actors: Actors) -> None:
    result = actors.run("--workers=1 --ps=1", "all=describe", "ps=touch:shown,sleep:900", "chief=wait_for:shown")
    for label in ("chief 0", "ps 0"):
        assert f"cores: {sorted(os.sched_getaffinity(0))} of []" in lines_of(result.stdout, label)


def test_every_process_asks_for_huge_pages_unless_the_user_says_otherwise(actors: Actors) -> None:
    for given, gets in (
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=3", "glibc.malloc.arena_max=3:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ):
        actors.environ["GLIBC_TUNABLES"] = given
        result = actors.run("--workers=1", "worker0=describe")
        assert f"GLIBC_TUNABLES={gets}" in lines_of(result.stdout, "worker 0")


def test_gpus_are_shared_out(actors: Actors) -> None:
    actors.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7,8"
    result = actors.run("--workers=2 --ps=1", "all=describe", "ps=touch:shown,sleep:900", "chief=wait_for:shown")
    seen = {label: lines_of(result.stdout, label)[-2] for label in ("chief 0", "worker 0", "worker 1", "ps 0")}
    assert [value.partition("=")[2] for value in seen.values()] == ["-1", "4,5", "6,7", "-1"]
    actors.environ["CUDA_VISIBLE_DEVICES"] = "0"
    result = actors.run("--workers=2", "all=describe")
    assert "training on the CPU" in result.stdout
    assert lines_of(result.stdout, "worker 1")[-2] == "CUDA_VISIBLE_DEVICES=-1"
    result = actors.run("--workers=2 --share_gpus", "all=describe")
    assert "training on the CPU" not in result.stdout
    assert lines_of(result.stdout, "worker 1")[-2] == "CUDA_VISIBLE_DEVICES=0"
    options = launch.LaunchOptions(command=("x",), workers=2)
    assert launch.commands(options, {}, ["0", "0"])[1].environ[SHARED_GPUS] == "1"
    assert SHARED_GPUS not in launch.commands(options, {}, ["0", "1"])[1].environ


def test_module_instead_of_script(actors: Actors) -> None:
    actors.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SCRIPTS)])
    result = actors.run("--workers=1", script=["-m", "actor", "worker0=say:from a module"])
    assert (result.returncode, lines_of(result.stdout, "worker 0")) == (0, ["from a module"])


def test_free_ports_can_be_bound() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = launch.free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < first_ephemeral  # where no outgoing connection can take one
    for port in ports:
        with socket.socket() as server:
            server.bind(("", port))
            server.listen()


@pytest.mark.parametrize(
    ("workers", "gpus", "expected"),
    [
        (2, [], []),
        (2, ["0", "1"], ["0", "1"]),
        (2, ["0", "1", "2", "3", "4"], ["0,1", "2,3"]),
        (1, ["0", "1"], ["0,1"]),
        (2, ["0"], ["-1", "-1"]),
    ],
)
def test_share_gpus(workers: int, gpus: list[str], expected: list[str]) -> None:
    assert gpu_slots.share_gpus(workers, gpus) == expected


def test_share_gpus_with_others() -> None:
    assert gpu_slots.share_gpus(3, ["4", "5"], together=True) == ["4", "5", "4"]
    assert gpu_slots.share_gpus(2, ["4", "5", "6"], together=True) == ["4", "5"]


@pytest.mark.parametrize(("value", "expected"), [("", []), ("-1", []), ("0,1", ["0", "1"]), ("2,-1,3", ["2"])])
def test_visible_gpus(value: str, expected: list[str]) -> None:
    assert gpu_slots.visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == expected


def test_a_driver_that_does_not_answer(monkeypatch):
    def silent(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", silent)
    with pytest.raises(ConfigError, match=r"nvidia-smi has not answered .* CUDA_VISIBLE_DEVICES \(-1: none\)"):
        gpu_slots.visible_gpus({})

"""Cores: affinity, and the limits of control groups as containers set them."""

from __future__ import annotations

import json
import os
import pathlib

from tfpar.process import cores as cores_module
from tfpar.process.cores import WORKER_CORES, cores, cores_of_host, cores_of_others, cpu_quota, share_out

import pytest

pytestmark = pytest.mark.without_keras


def groups(tmp_path: pathlib.Path, lines: str, files: dict[str, str]) -> dict[str, pathlib.Path]:
    """The arguments of `cpu_quota` for a process in these groups, with these files below their mount."""
    (tmp_path / "cgroup").write_text(lines)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"groups": tmp_path / "cgroup", "root": tmp_path / "mount"}


V1 = "4:memory:/job\n3:cpu,cpuacct:/pods/job\n1:name=systemd:/job\n"


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),  # the root of a host has no limit, and no such file
        ("0::/pods/job\n", {"pods/job/cpu.max": "max 100000\n", "pods/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/pods/job\n", {"pods/job/cpu.max": "50000 100000\n", "pods/cpu.max": "400000 100000\n"}, 0.5),
        ("0::/of/the/host\n", {"cpu.max": "300000 100000\n"}, 3.0),  # of a container that sees the paths of its host
        (
            V1,
            {"cpu,cpuacct/pods/job/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/pods/job/cpu.cfs_period_us": "1e5"},
            2.5,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("0::/\n", {"cpu.max": "100000 0"}, None),
    ],
)
def test_the_smallest_limit_counts(tmp_path, lines, files, expected):
    assert cpu_quota(**groups(tmp_path, lines, files)) == expected


def test_systems_without_control_groups_have_no_limit(tmp_path):
    assert cpu_quota(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (100.0, 8), (2.5, 3), (0.25, 1)])
def test_a_part_of_a_core_counts_as_one(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(cores_module, "cpu_quota", lambda: quota)
    assert cores() == expected


@pytest.fixture
def machine(monkeypatch):
    """Lets this process use some cores; two in a row are hardware threads of a core if `threads` says so."""

    def set_up(usable, quota=None, *, threads=False):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(usable))
        monkeypatch.setattr(cores_module, "cpu_quota", lambda: quota)
        half = len(usable) // 2
        monkeypatch.setattr(cores_module, "_place", lambda number: (number % half if threads else 0, number))

    return set_up


@pytest.mark.parametrize(
    ("usable", "processes", "expected"),
    [
        (range(8), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (range(8), 8, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ([2, 3, 5, 7, 11], 2, [[2, 3], [5, 7, 11]]),
        (range(4), 1, []),  # it has all
        (range(4), 5, []),
    ],
)
def test_processes_get_cores_of_their_own_if_there_are_enough(machine, usable, processes, expected):
    machine(usable)
    assert share_out(processes) == expected


def test_threads_of_a_core_stay_together(machine):
    machine(range(8), threads=True)
    assert share_out(2) == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_limited_time_is_not_shared_out_as_cores(machine):
    machine(range(8), quota=4.0)
    assert share_out(2) == []
    machine(range(8), quota=8.0)
    assert len(share_out(2)) == 2


def test_workers_know_the_cores_of_all(machine, monkeypatch):
    machine([2, 3])
    monkeypatch.delenv(WORKER_CORES, raising=False)
    assert (cores_of_host(), cores_of_others()) == (2, [])
    monkeypatch.setenv(WORKER_CORES, json.dumps([[0, 1], [2, 3], [4, 5, 6]]))
    assert (cores(), cores_of_host(), cores_of_others()) == (2, 7, [[0, 1], [4, 5, 6]])


def test_the_place_of_a_core_is_its_socket_die_and_core_if_the_system_says(tmp_path):
    for name, number in (("physical_package_id", 1), ("die_id", 0), ("core_id", 5)):
        path = tmp_path / "cpu7" / "topology" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n")
    assert cores_module._place(7, tmp_path) == (1, 0, 5, 7)
    assert cores_module._place(8, tmp_path) == (8,)

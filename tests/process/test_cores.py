"""Cores: affinity, and the limits of control groups as containers set them."""

from __future__ import annotations

import os
import pathlib

from tfpar.process import cores as cores_module
from tfpar.process.cores import cores, cpu_quota

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

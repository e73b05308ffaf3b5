"""tfpar.doctor: a real examination of this machine and of a two-worker cluster, and each verdict."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import nursery, permissions
from tfpar.doctor import checks as checkup
from tfpar.doctor import cli as doctor
from tfpar.doctor.cli import FAIL, OK, WARN, Check
from tfpar.doctor.probe import Probe
from tfpar_ops import library

import pytest

pytestmark = pytest.mark.without_keras

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, start: Any = subprocess.run, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "KERAS_BACKEND")}
    return start(
        [sys.executable, "-m", "tfpar.doctor", *arguments],
        cwd=ROOT,
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_healthy_machine(tmp_path: Path) -> None:
    result = run("--json", f"--data_dir={tmp_path}")
    assert (result.returncode, result.stderr) == (0, ""), result.stdout  # nothing of TensorFlow's start-up either
    report = json.loads(result.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [
        *("python", "cpu", "memory", "data_dir", "environment", "tensorflow", "keras", "keras backend"),
        *("gpu", "cuda", "nccl", "xla", "tfpar_ops", "tfpar_ops cuda", "transport", "cluster"),
    ]
    facts = library.build_facts()
    assert (facts.get("cuda") or "no GPU kernels") in checks["tfpar_ops cuda"]["detail"]
    assert report["ok"]
    assert all(check["status"] in (OK, WARN) for check in checks.values())
    assert checks["keras backend"]["detail"] == "tensorflow"
    assert "CPU:0" in checks["xla"]["detail"]
    assert checks["data_dir"]["detail"].startswith(str(tmp_path))


def test_a_wrong_backend_and_a_malformed_tf_config() -> None:
    """Two reasons to fail in one run: both are named, with exit code 1."""
    result = run(KERAS_BACKEND="no_such_backend", TF_CONFIG="{'worker'}", COLUMNS="200")
    assert result.returncode == 1
    assert re.search(r"^tensorflow +FAIL .*no_such_backend", result.stdout, re.MULTILINE)
    assert "-> Set KERAS_BACKEND=tensorflow" in result.stdout
    assert re.search(r"^cluster +FAIL .*TF_CONFIG: not JSON", result.stdout, re.MULTILINE)
    assert re.match(r"not fit to train: \d+ checks, 0 warnings, 2 FAIL", result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--jsn", "unknown argument --jsn. Did you mean --json?"),
        ("--timeout=x", "--timeout=x is not a number;"),
        ("--timeout=nan", "--timeout=nan must be at least 0 and at most 1000000 seconds."),
        ("--timeout=inf", "--timeout=inf must be at least 0"),
        ("--timeout=-1", "--timeout=-1 must be at least 0"),
    ],
)
def test_a_wrong_flag_is_one_line(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main([flag], "tfpar doctor")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.endswith(" See tfpar doctor --help.\n")
    assert error.count("\n") == 1


@pytest.mark.cluster
def test_doctors_of_a_cluster_reach_each_other() -> None:
    command = [sys.executable, "-m", "tfpar.launch", "--workers=2", "--", "-m", "tfpar.doctor", "--timeout=60"]
    result = nursery.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout
    for own, peer in ((0, 1), (1, 0)):
        assert re.search(
            rf"^\[worker {own}\] worker {peer} +ok +127\.0\.0\.1:\d+ reached in", result.stdout, re.MULTILINE
        )


def tf_config(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": addresses}, "task": task}))


def test_peers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as own, socket.socket() as closed:
        own.bind(("", 0))  # taken, as by a training that runs
        own.listen()
        closed.bind(("127.0.0.1", 0))
        ports = [sock.getsockname()[1] for sock in (own, closed)]
        tf_config(monkeypatch, *(f"127.0.0.1:{port}" for port in ports))
        found = {check.name: check for check in doctor.check_cluster(timeout=0.3)}
    assert found["cluster"].status == OK
    assert (found["own port"].status, found["worker 1"].status) == (WARN, WARN)
    assert "nothing listens" in found["worker 1"].detail
    assert "cannot be opened" in found["own port"].detail


def test_a_peer_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    tf_config(monkeypatch, "this-host:47001", "no-such-host.invalid:47001")
    found = {check.name: check for check in doctor.check_cluster(timeout=0.3)}
    assert found["worker 1"].status == FAIL
    assert "resolves" in found["worker 1"].fix


@pytest.mark.parametrize(
    ("environ", "hint"),
    [({}, ""), ({"SLURM_JOB_ID": "7"}, "Slurm"), ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "TFPAR_WORKER_HOSTS")],
)
def test_no_cluster(environ: dict[str, str], hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CONFIG", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (check,) = doctor.check_cluster(timeout=0.1)
    assert check.status == OK
    assert hint in check.detail


# Verdicts from facts. The facts of other machines are written down here: this one has one CPU and no GPU.

HEALTHY = {
    "tensorflow": "2.21.0",
    "build": {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"},
    "nccl": ["GPU"],
    "gpus": [],
    "keras": {"version": "3.15.1", "backend": "tensorflow"},
    "ops": {"status": "built"},
    "xla": [{"device": "CPU:0", "right": True, "seconds": 0.1}],
}


def verdicts(**changes: object) -> dict[str, Check]:
    return {check.name: check for check in doctor.check_tensorflow({**HEALTHY, **changes})}


@pytest.mark.parametrize(
    ("changes", "name", "status", "text"),
    [
        ({"tensorflow": "2.22.1"}, "tensorflow", WARN, "tested with 2.19, 2.20, 2.21"),
        ({"tensorflow": "3.0.0"}, "tensorflow", FAIL, "tested with 2.19, 2.20, 2.21"),
        ({"keras": {"version": "2.15.0", "backend": "tensorflow"}}, "keras", FAIL, "tested with 3.15"),
        ({"keras": {"version": "3.15.0", "backend": "jax"}}, "keras backend", FAIL, "jax"),
        ({"keras": {"error": "ImportError: no keras"}}, "keras", FAIL, "no keras"),
        ({"ops": {"error": "ImportError: bad symbol"}}, "tfpar_ops", FAIL, "bad symbol"),
        ({"xla": [{"device": "GPU:0", "right": False, "seconds": 1.0}]}, "xla", FAIL, "GPU:0 computes wrong results"),
        ({"xla": [], "error": "SIGSEGV: no output"}, "xla", FAIL, "SIGSEGV"),
        ({"nccl": [], "gpus": [{}, {}]}, "nccl", WARN, "no kernels"),
        ({"build": {"is_cuda_build": False}}, "cuda", OK, "without CUDA"),
        (
            {"gpus": [{"device_name": "NVIDIA H100", "compute_capability": "(9, 0)"}]},
            "gpu",
            OK,
            "NVIDIA H100 (compute capability (9, 0))",
        ),
    ],
)
def test_verdicts(changes: dict[str, object], name: str, status: str, text: str) -> None:
    check = verdicts(**changes)[name]
    assert check.status == status
    assert text in check.detail
    assert check.fix or status != FAIL


def test_a_gpu_that_tensorflow_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is there, its libraries are not: nvidia-smi is played by a script, as no GPU is at hand."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA A100, 40960 MiB, 550.54'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check = verdicts()["gpu"]
    assert check.status == FAIL
    assert "A100" in check.detail
    assert "tensorflow[and-cuda]" in check.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert verdicts()["gpu"].status == OK


H100 = {"device_name": "NVIDIA H100", "compute_capability": "(9, 0)"}
P100 = {"device_name": "Tesla P100", "compute_capability": "(6, 0)"}
L4 = {"device_name": "NVIDIA L4", "compute_capability": "(8, 9)"}
CUDA_12_5 = {"cuda": "12.5", "cuda_capabilities": ["7.5", "8.0", "9.0"]}
CUDA_GAP = {"cuda": "12.5", "cuda_capabilities": ["7.5", "9.0"]}
CUDA_13 = {**CUDA_12_5, "cuda": "13.0"}


@pytest.mark.parametrize(
    ("built", "gpus", "driver", "status", "text", "fix"),
    [
        ({}, [], "", OK, "no GPU kernels; there is no GPU", ""),
        ({}, [H100], "", WARN, "no GPU kernels: codecs", "Put nvcc of CUDA 12.5.1 on the PATH"),
        ({"cuda": ""}, [H100], "", WARN, "no GPU kernels: codecs", "make setup"),
        (CUDA_13, [], "", OK, "built with CUDA 13.0, TensorFlow with 12.5.1; there is no GPU here", ""),
        (CUDA_12_5, [H100], "", OK, "built with CUDA 12.5, TensorFlow with 12.5.1", ""),
        (CUDA_12_5, [H100, P100], "", FAIL, "no kernels for Tesla P100", "CUDA_VISIBLE_DEVICES"),
        (CUDA_12_5, [L4], "", OK, "built with CUDA 12.5", ""),
        (CUDA_GAP, [H100, L4], "", FAIL, "7.5, 9.0 and later: no kernels for NVIDIA L4", "TFPAR_CUDA_ARCHITECTURES"),
        (CUDA_13, [H100], "", WARN, "a major version other than TensorFlow's; it needs driver 580", "nvidia-smi"),
        (CUDA_13, [H100], "[N/A]", WARN, "a major version other than TensorFlow's; it needs driver 580", "nvidia-smi"),
        (CUDA_13, [H100], "580.65.06", OK, "built with CUDA 13.0", ""),
        (CUDA_13, [H100], "550.54", FAIL, "need driver 580 or later, and this machine has 550", "Update the driver"),
        ({**CUDA_13, "cuda": "14.1"}, [H100], "600.1", WARN, "needs a driver for CUDA 14", "nvcc of CUDA 12.5.1"),
    ],
)
def test_the_cuda_that_the_codecs_were_built_with(
    built: dict, gpus: list, driver: str, status: str, text: str, fix: str, tmp_path: Path, monkeypatch
) -> None:
    """Against TensorFlow's 12.5.1, and the driver that a script in place of nvidia-smi tells, if there is one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if driver:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho >> {tmp_path}/asked\necho 'NVIDIA H100, 81559 MiB, {driver}'\n")
        tool.chmod(0o755)
    check = verdicts(gpus=gpus, ops={"status": "built", "built": built})["tfpar_ops cuda"]
    assert not driver or (tmp_path / "asked").read_text() == "\n"  # once: the driver may take seconds
    assert check.status == status
    assert text in check.detail
    assert fix in check.fix
    assert bool(check.fix) == (status != OK)


def test_an_unknown_choice_of_the_codecs_is_named() -> None:
    result = run("--json", start=nursery.run, TFPAR_OPS_TARGET="avx512")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.returncode == 1
    assert checks["tfpar_ops"]["status"] == FAIL
    assert "TFPAR_OPS_TARGET='avx512' is not one of baseline, x86-64-v3, x86-64-v4" in checks["tfpar_ops"]["detail"]
    assert "Unset the variable" in checks["tfpar_ops"]["fix"]


def test_tensorflow_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU without AVX does: the process that imports TensorFlow dies, the doctor tells."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho The TensorFlow library was compiled to use AVX >&2\nkill -ILL $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    facts = Probe().facts()
    assert facts["error"] == "SIGILL: The TensorFlow library was compiled to use AVX"
    (check,) = doctor.check_tensorflow(facts)
    assert check.status == FAIL
    assert "lacks AVX" in check.fix


def test_data_dir_that_cannot_be_written() -> None:
    check = doctor.check_data_dir("/dev/null/data")
    assert (check.name, check.status) == ("data_dir", FAIL)
    assert "TFDS_DATA_DIR" in check.fix


def test_data_dir_that_may_not_be_searched(tmp_path: Path) -> None:
    with permissions.of(tmp_path, 0):
        check = doctor.check_data_dir(str(tmp_path / "data"))
    assert check.status == FAIL
    assert check.detail == f"{tmp_path}/data cannot be written: Permission denied"


def test_legacy_keras_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    assert doctor.check_environment().status == WARN


def test_tested_releases_are_those_that_setup_allows() -> None:
    setup = (ROOT / "setup.py").read_text()
    for name, releases in checkup.TESTED.items():
        major, last = releases[-1].split(".")
        assert f'"{name}>={releases[0]},<{major}.{int(last) + 1}"' in setup


def test_report_wraps_and_counts() -> None:
    checks = [Check("a", OK, "fine"), Check("bb", WARN, "word " * 60, "do this"), Check("c", FAIL, "x", "do that")]
    lines = doctor.report(checks, colours=False).splitlines()
    assert lines[0] == "a   ok    fine"
    assert lines[-1] == "not fit to train: 3 checks, 1 warning, 1 FAIL"
    assert "          -> do that" in lines

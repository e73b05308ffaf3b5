"""The files in deploy/: the Kubernetes manifest, and the Slurm batch script with stand-ins for srun and scontrol."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tfpar import cluster
from tfpar.process import exit_codes

import pytest

pytestmark = pytest.mark.without_keras

ROOT = Path(__file__).resolve().parents[2]


def test_the_manifest_describes_one_cluster() -> None:
    """Number of pods, host list, Service and port belong together; every pod finds itself."""
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()

    def value(key: str) -> str:
        (found,) = set(re.findall(rf"^ *(?:- )?{key}: *\"?([^\s\"]+)", text, re.MULTILINE))
        return found

    hosts = re.search(r"name: TFPAR_WORKER_HOSTS\n *value: \"([^\"]+)\"", text)
    assert hosts is not None
    pods = int(value("completions"))
    assert pods == int(value("parallelism"))
    for index in range(pods):
        info = cluster.detect({"TFPAR_WORKER_HOSTS": hosts[1], "JOB_COMPLETION_INDEX": str(index)})
        assert info is not None
        assert info.num_workers == pods
        job, service = value("job-name"), value("subdomain")
        assert info.address == f"{job}-{index}.{service}:{value('containerPort')}"
    assert value("port") == value("containerPort")
    assert text.count("\n  name: tfpar\n") == 2  # Service and Job, as host names and labels want them


# Plays srun with three tasks, each in a process group of its own: signals go to the group, the highest code is its own.
SRUN = """#!/bin/bash
echo "port=$TFPAR_PORT cpus=$SRUN_CPUS_PER_TASK threads=$TF_NUM_INTRAOP_THREADS"
while [[ $1 == --* ]]; do shift; done
tasks=()
for rank in 0 1 2; do
    SLURM_PROCID=$rank setsid "$@" &
    tasks+=($!)
done
if [[ $CODES == told* ]]; then
    until [[ -e up.0 && -e up.1 && -e up.2 ]]; do sleep 0.05; done
    kill -TERM -- "${tasks[@]/#/-}"
fi
highest=0
for task in "${tasks[@]}"; do
    wait "$task"
    code=$?
    ((code > highest)) && highest=$code
done
exit "$highest"
"""
# A worker: CODES has what becomes of each. `gone` takes its shell along, as the end of its node does.
WORKER = """#!/bin/bash
codes=($CODES)
case ${codes[SLURM_PROCID]} in
    killed) kill -KILL $$ ;;
    gone) kill -KILL $PPID $$ ;;
    told)
        trap 'exit 85' TERM
        touch "up.$SLURM_PROCID"
        for _ in {1..400}; do sleep 0.05; done ;;
    *) echo "$@"; exit "${codes[SLURM_PROCID]}" ;;
esac
"""


def submit(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    scontrol = '#!/bin/sh\necho "scontrol $@"\n'
    for name, text in (("srun", SRUN), ("python", WORKER), ("scontrol", scontrol)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environ = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "PYTHON": str(folder / "python"),
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "tfpar",
        "SLURM_CPUS_PER_TASK": "4",
    }
    command = ["bash", str(ROOT / "deploy" / "slurm.sbatch"), "--steps=3"]
    return subprocess.run(
        command, env=environ | variables, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("variables", "started"),
    [
        ({}, "-u experiments/image_classification.py --workdir=runs/tfpar --steps=3"),
        ({"TFPAR_PS": "1"}, "-u experiments/image_classification.py --workdir=runs/tfpar --steps=3"),
        ({"DOCTOR": "1"}, "-m tfpar.doctor"),
    ],
)
def test_the_batch_script(variables: dict[str, str], started: str, tmp_path: Path) -> None:
    """What it starts in each task, and where."""
    result = submit(tmp_path, CODES="0 0 0", **variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["port=22345 cpus=4 threads=4", *[started] * 3]
    assert not list(tmp_path.glob(".exits*"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("codes", "variables", "code", "requeued"),
    [
        ("85 85 85", {}, 85, True),
        ("told told told", {}, 85, True),
        ("75 75 killed", {}, 137, True),
        ("75 gone 75", {}, 137, True),
        ("75 139 75", {}, 139, True),
        ("75 75 killed", {"SLURM_RESTART_COUNT": "20"}, 137, False),
        ("75 1 75", {}, 1, False),
        ("2 2 2", {}, 2, False),
        ("65 75 137", {}, 65, False),
        ("0 0 killed", {"TFPAR_PS": "1"}, 0, False),
        ("75 killed 143", {"TFPAR_PS": "1"}, 75, True),
        ("gone 143 143", {"TFPAR_PS": "1"}, 137, True),
        ("65 143 143", {"TFPAR_PS": "1"}, 65, False),
    ],
)
def test_the_batch_script_ends_as_its_tasks(
    codes: str, variables: dict[str, str], code: int, requeued: bool, tmp_path: Path
) -> None:
    """Back into the queue goes what may do better the next time; with servers, the chief's code is the job's."""
    result = submit(tmp_path, CODES=codes, **variables)
    assert result.returncode == code, result.stderr
    assert ("scontrol requeue 12345" in result.stdout.splitlines()) == requeued
    assert not list(tmp_path.glob(".exits*"))


def test_no_scheduler_repeats_what_would_only_fail_again() -> None:
    policy = (ROOT / "deploy" / "kubernetes.yaml").read_text().partition("podFailurePolicy")[2]
    fail, ignore = re.findall(r"values: \[([\d, ]+)\]", policy)
    assert tuple(map(int, fail.split(","))) == exit_codes.NOT_RETRYABLE
    assert tuple(map(int, ignore.split(","))) == (exit_codes.PEER_LOST, exit_codes.PREEMPTED)
    final = re.search(r"--line-regexp '([^']+)'", (ROOT / "deploy" / "slurm.sbatch").read_text())
    assert final is not None
    assert set(map(int, final[1].split("\\|"))) == {1, *exit_codes.NOT_RETRYABLE}

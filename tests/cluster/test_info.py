"""tfpar.cluster: what is recognised, what is refused and how, and that TensorFlow reads the same."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

from tfpar import cluster
from tfpar.cluster import kubernetes
from tfpar.cluster.__main__ import main
from tfpar.cluster.info import EXAMPLE, LOCAL
from tfpar.cluster.members import Members, expand_hostlist
from tfpar.config import ConfigError
from tfpar.process import exit_codes

import pytest

pytestmark = pytest.mark.without_keras

ROOT = Path(__file__).resolve().parents[2]
TWO_WORKERS = {"worker": ["host0:2222", "host1:2222"]}
PS_CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}


def tf_config(jobs: object = None, task: object = None, **more: object) -> dict[str, str]:
    value = {
        "cluster": TWO_WORKERS if jobs is None else jobs,
        "task": {"type": "worker", "index": 0} if task is None else task,
        **more,
    }
    return {"TF_CONFIG": json.dumps(value)}


def test_tf_config_of_two_workers() -> None:
    info = cluster.detect(tf_config(task={"type": "worker", "index": 1}))
    assert info == cluster.ClusterInfo("TF_CONFIG", {"worker": ("host0:2222", "host1:2222")}, "worker", 1)
    assert (info.num_workers, info.worker_rank, info.is_chief, info.num_ps) == (2, 1, False, 0)
    assert info.address == "host1:2222"


@pytest.mark.parametrize(
    ("job", "index", "rank", "is_chief", "address"),
    [
        ("chief", 0, 0, True, "a:1"),
        ("worker", 0, 1, False, "b:1"),
        ("worker", 1, 2, False, "b:2"),
        ("ps", 0, -1, False, "c:1"),
        ("evaluator", 0, -1, False, ""),
    ],
)
def test_roles_in_a_parameter_server_cluster(job: str, index: int, rank: int, is_chief: bool, address: str) -> None:
    info = cluster.detect(tf_config(PS_CLUSTER, {"type": job, "index": index}))
    assert info is not None
    assert (info.worker_rank, info.is_chief, info.address) == (rank, is_chief, address)
    assert (info.num_workers, info.num_ps) == (3, 1)


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"environment": "cloud"}', '{"cluster": {}, "task": {}}'])
def test_no_cluster(text: str) -> None:
    assert cluster.detect({"TF_CONFIG": text}) is None
    assert cluster.current({"TF_CONFIG": text}) is LOCAL


def test_local_is_one_worker_that_is_the_chief() -> None:
    info = cluster.current({})
    assert (info.source, info.num_workers, info.worker_rank, info.is_chief, info.num_ps) == ("local", 1, 0, True, 0)


def test_leniency_that_tensorflow_shares() -> None:
    """Quoted index, other keys of managed services, IPv6."""
    info = cluster.detect(tf_config({"worker": ["[::1]:1", "[::1]:2"]}, {"type": "worker", "index": "1", "trial": "7"}))
    assert info is not None
    assert info.task_index == 1
    assert info.address == "[::1]:2"


BAD_TF_CONFIG = {
    "not JSON, with position": ('{"cluster": {"worker": ["a:1" "b:2"]}}', ["line 1, column 31", "<here>", "delimiter"]),
    "single quotes": ("{'cluster': {}}", ["column 2", "double quotes"]),
    "truncated": ('{"cluster": ', ["column 12"]),
    "not an object": ('["a:1"]', ["JSON object", "a list"]),
    "key twice": (
        '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
        ["'worker' is given twice"],
    ),
    "no task": (json.dumps({"cluster": TWO_WORKERS}), ["'task' is missing", "'cluster'"]),
    "no cluster": (json.dumps({"task": {"type": "worker", "index": 0}}), ["'cluster' is missing", "'task'"]),
    "cluster is a list": (json.dumps({"cluster": ["a:1"], "task": {"type": "worker"}}), ["'cluster' must be", "list"]),
    "unknown job": (tf_config({"workers": ["a:1"]}), ["'workers'", "Did you mean 'worker'"]),
    "job of TensorFlow 1": (tf_config({"master": ["a:1"]}), ["'master'", "called 'chief'"]),
    "job without list": (tf_config({"worker": "a:1"}), ["'worker'", "a list", '"a:1"']),
    "job with numbers": (tf_config({"worker": [2222]}), ["'host:port' strings", "[2222]"]),
    "empty job": (tf_config({"worker": []}), ["'worker' has no task"]),
    "two chiefs": (tf_config({"chief": ["a:1", "b:1"], "worker": ["c:1"]}), ["2 tasks in job 'chief'"]),
    "ps alone": (tf_config({"ps": ["a:1"]}), ["no worker", "ps"]),
    "ps without chief": (tf_config({"worker": ["a:1"], "ps": ["b:1"]}), ["need a 'chief'"]),
    "task without index": (tf_config(task={"type": "worker"}), ["no 'index'", '{"type": "worker"}']),
    "task without type": (tf_config(task={"index": 0}), ["no 'type'"]),
    "type misspelt": (tf_config(task={"type": "Worker", "index": 0}), ["'Worker'", "Did you mean 'worker'"]),
    "type not in cluster": (tf_config(task={"type": "chief", "index": 0}), ["'chief' is not in the cluster", "worker"]),
    "type a number": (tf_config(task={"type": 3, "index": 0}), ["string", "3"]),
    "index too large": (tf_config(task={"type": "worker", "index": 2}), ["index 2", "0 to 1"]),
    "index negative": (tf_config(task={"type": "worker", "index": -1}), ["index -1", "0 to 1"]),
    "index a word": (tf_config(task={"type": "worker", "index": "first"}), ['"first"', "whole number"]),
    "index a boolean": (tf_config(task={"type": "worker", "index": True}), ["true", "whole number"]),
    "index a fraction": (tf_config(task={"type": "worker", "index": 0.5}), ["0.5", "whole number"]),
    "evaluator index": (tf_config(task={"type": "evaluator", "index": 1}), ["index 1", "0 to 0"]),
    "no port": (tf_config({"worker": ["host0"]}), ["'host0' of worker 0", "no port", "'host0:2222'"]),
    "scheme": (tf_config({"worker": ["grpc://a:1"]}), ["scheme", "write 'a:1'"]),
    "port not a number": (tf_config({"worker": ["a:http"]}), ["'a:http'", "host:port"]),
    "port 0": (tf_config({"worker": ["a:0"]}), ["port 0", "1 to 65535"]),
    "port too large": (tf_config({"worker": ["a:1", "b:70000"]}), ["port 70000 of worker 1", "1 to 65535"]),
    "blank in the host": (tf_config({"worker": ["a b:1"]}), ["'a b:1'", "host:port"]),
    "bare IPv6": (tf_config({"worker": ["fe80::1:2222"]}), ["brackets"]),
    "same address": (tf_config({"worker": ["a:1", "A:1"]}), ["worker 0 and worker 1", "same address"]),
    "same address in two jobs": (tf_config({"chief": ["a:1"], "worker": ["a:1"]}), ["chief 0 and worker 0"]),
    "loopback by two names": (tf_config({"worker": ["localhost:1", "127.0.0.1:1"]}), ["same address"]),
    "loopback among hosts": (tf_config({"worker": ["localhost:1", "host1:1"]}), ["loopback", "'host1:1'"]),
}


@pytest.mark.parametrize("name", BAD_TF_CONFIG)
def test_bad_tf_config(name: str) -> None:
    given, expected = BAD_TF_CONFIG[name]
    environ = given if isinstance(given, dict) else {"TF_CONFIG": given}
    with pytest.raises(ConfigError) as caught:
        cluster.detect(environ)
    message = str(caught.value)
    for part in ["TF_CONFIG: ", *expected, EXAMPLE]:
        assert part in message
    assert "\n" not in message


def test_the_example_in_the_messages_is_right() -> None:
    info = cluster.detect({"TF_CONFIG": EXAMPLE})
    assert info is not None
    assert info.num_workers == 2


def test_the_command_prints_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": ["a:1", "b:2"]}, {"type": "worker", "index": 1})["TF_CONFIG"])
    assert main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "worker 1 of 2 worker (TF_CONFIG)",
        "  worker 0  a:1",
        "  worker 1  b:2  (this process)",
    ]
    monkeypatch.delenv("TF_CONFIG")
    assert main() == 0
    assert capsys.readouterr().out == "worker 0 of one process (local)\n"
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main() == exit_codes.USAGE_ERROR
    assert capsys.readouterr().err.startswith("error: TF_CONFIG: not JSON")


def test_validation_does_not_import_tensorflow() -> None:
    script = "import sys, tfpar.cluster as c; c.detect(); assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, env=tf_config(), cwd=ROOT)


def test_tensorflow_reads_what_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    monkeypatch.delenv("TF_CONFIG", raising=False)
    info = cluster.ClusterInfo("slurm", {job: tuple(tasks) for job, tasks in PS_CLUSTER.items()}, "worker", 1)
    cluster.export_tf_config(info)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == PS_CLUSTER
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    again = cluster.detect()
    assert again is not None
    assert (again.cluster, again.task_type, again.task_index) == (info.cluster, "worker", 1)
    cluster.export_tf_config(LOCAL)
    assert cluster.detect({**tf_config(), "TF_CONFIG": ""}) is None


# Slurm.


def slurm(rank: int, nodes: str, tasks: str, total: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(total),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        **more,
    }


@pytest.mark.parametrize(
    ("nodes", "tasks", "total"),
    [("n[1-2],o[3-4,6]", "1(x5)", 5), ("gpu[007-010]", "2(x4)", 8), ("a1,b2", "3,1", 4), ("solo", "4", 4)],
)
def test_slurm_agrees_with_tensorflows_resolver(
    nodes: str, tasks: str, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where TensorFlow's resolver works at all: GPUs given, hosts that sort as text the way Slurm lists them."""
    import tensorflow as tf

    for rank in range(total):
        environ = slurm(rank, nodes, tasks, total)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=4, gpus_per_task=1, auto_set_gpu=False
        )
        spec = resolver.cluster_spec().as_dict()
        info = cluster.detect(environ)
        assert info is not None
        assert {job: list(hosts) for job, hosts in info.cluster.items()} == spec
        assert (info.source, info.task_type, info.task_index) == ("slurm", *resolver.get_task_info())


def test_slurm_keeps_the_order_of_the_node_list() -> None:
    """TensorFlow 2.21 sorts n1, n10, n2, and would send rank 1's traffic to n10, while Slurm runs rank 1 on n2."""
    info = cluster.detect(slurm(1, "n[1-2,10]", "1(x3)", 3, SLURMD_NODENAME="n2", SLURM_LOCALID="0"))
    assert info is not None
    assert info.cluster == {"worker": ("n1:8888", "n2:8888", "n10:8888")}
    assert info.address == "n2:8888"


def test_slurm_cyclic_order_and_port() -> None:
    environ = slurm(2, "n[1-2]", "2(x2)", 4, SLURM_DISTRIBUTION="cyclic:block", TFPAR_PORT="7000")
    info = cluster.detect({**environ, "SLURMD_NODENAME": "n1", "SLURM_LOCALID": "1"})
    assert info is not None
    assert info.cluster == {"worker": ("n1:7000", "n2:7000", "n1:7001", "n2:7001")}


def test_slurm_with_parameter_servers() -> None:
    roles = []
    for rank in range(4):
        info = cluster.detect(slurm(rank, "n[1-4]", "1(x4)", 4, TFPAR_PS="1"))
        assert info is not None
        roles.append((info.task_type, info.task_index, info.address))
    assert roles == [("chief", 0, "n1:8888"), ("worker", 0, "n2:8888"), ("worker", 1, "n3:8888"), ("ps", 0, "n4:8888")]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (slurm(0, "n[1-2]", "1", 2), ["2 nodes", "TASKS_PER_NODE=1 (1 tasks)", "NUM_TASKS=2"]),
        (slurm(0, "n[1-]", "2", 2), ["'1-'", "range"]),
        (slurm(0, "n[3-1]", "2", 2), ["'3-1'", "low-high"]),
        (slurm(0, "n1", "two", 2), ["'two'", "2(x3)"]),
        (slurm(0, "", "2", 2), ["SLURM_STEP_NODELIST=''", "srun"]),
        (slurm(2, "n[1-2]", "1(x2)", 2), ["process 2", "0 to 1"]),
        ({**slurm(0, "n1", "2", 2), "SLURM_PROCID": "x"}, ["SLURM_PROCID='x'", "whole number"]),
        (slurm(1, "n[1-2]", "2(x2)", 4, SLURMD_NODENAME="n2", SLURM_LOCALID="0"), ["task 0 of n2", "block"]),
        (slurm(0, "n[1-3]", "1(x3)", 3, TFPAR_PS="2"), ["TFPAR_PS=2", "at most 1"]),
    ],
)
def test_bad_slurm(environ: dict[str, str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster.detect(environ)
    for part in expected:
        assert part in str(caught.value)


def test_a_slurm_step_of_one_task_is_no_cluster() -> None:
    assert cluster.detect(slurm(0, "n1", "1", 1)) is None
    assert cluster.detect({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None  # the batch script itself


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[3-4].lan", ["r1n3.lan", "r1n4.lan", "r2n3.lan", "r2n4.lan"]),
        ("a, b", ["a", "b"]),
        ("[::1]:1,[::1]:2", ["[::1]:1", "[::1]:2"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


# Kubernetes.

HOSTS = {"TFPAR_WORKER_HOSTS": "train-[0-2].train:2222"}


@pytest.mark.parametrize(
    "identity", [{"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "other"}, {"HOSTNAME": "train-2"}, {"HOSTNAME": "s-2.a.b"}]
)
def test_kubernetes_member_of_a_host_list(identity: dict[str, str]) -> None:
    info = cluster.detect(HOSTS | identity)
    addresses = tuple(f"train-{index}.train:2222" for index in range(3))
    assert info == cluster.ClusterInfo("kubernetes", {"worker": addresses}, "worker", 2)


def test_kubernetes_default_port() -> None:
    info = cluster.detect({"TFPAR_WORKER_HOSTS": "a,b:1", "JOB_COMPLETION_INDEX": "0"})
    assert info is not None
    assert info.cluster == {"worker": ("a:8470", "b:1")}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HOSTS | {"HOSTNAME": "laptop"}, ["'laptop'", "JOB_COMPLETION_INDEX"]),
        (HOSTS | {"JOB_COMPLETION_INDEX": "3"}, ["process 3", "0 to 2"]),
        ({"TFPAR_WORKER_HOSTS": "a:x,b:1", "JOB_COMPLETION_INDEX": "0"}, ["'a:x:8470'", "colon"]),
        ({"TFPAR_KUBERNETES_SELECTOR": "a=b", "HOST_IP": "1.2.3.4"}, ["TFPAR_NUM_WORKERS", "TFPAR_WORKER_HOSTS"]),
    ],
)
def test_bad_kubernetes(environ: dict[str, str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster.detect(environ)
    for part in expected:
        assert part in str(caught.value)


class PodList:
    """The one call of the API that TensorFlow's resolver makes; pods start one listing after the other."""

    def __init__(self, nodes: list[str]) -> None:
        self.nodes, self.listings = nodes, 0

    def list_pod_for_all_namespaces(self, label_selector: str) -> types.SimpleNamespace:
        assert label_selector == "job-name=train"
        self.listings += 1
        pods = [
            types.SimpleNamespace(
                metadata=types.SimpleNamespace(name=f"train-{index}"),
                status=types.SimpleNamespace(phase="Running" if index < self.listings else "Pending", host_ip=node),
            )
            for index, node in enumerate(self.nodes)
        ]
        return types.SimpleNamespace(items=pods)


SELECTOR = {"TFPAR_KUBERNETES_SELECTOR": "job-name=train", "TFPAR_NUM_WORKERS": "2", "HOST_IP": "10.0.0.2"}


def test_kubernetes_api_waits_for_all_pods() -> None:
    pods = PodList(["10.0.0.1", "10.0.0.2"])
    members = kubernetes.ask_kubernetes(SELECTOR, client=pods, timeout=30)
    assert members == Members("kubernetes", ("10.0.0.1:8470", "10.0.0.2:8470"), 1)
    assert pods.listings == 2


def test_kubernetes_api_says_what_it_waited_for() -> None:
    with pytest.raises(ConfigError, match=r'Pod "train-1" is not running.*TFPAR_NUM_WORKERS=2'):
        kubernetes.ask_kubernetes(SELECTOR, client=PodList(["10.0.0.1", "10.0.0.2", "10.0.0.3"]), timeout=0)
    with pytest.raises(ConfigError, match=r"HOST_IP=10\.0\.0\.9 is not among"):
        kubernetes.ask_kubernetes(SELECTOR | {"HOST_IP": "10.0.0.9", "TFPAR_NUM_WORKERS": "1"}, PodList(["10.0.0.1"]))


def test_tf_config_wins_over_slurm_and_kubernetes() -> None:
    info = cluster.detect({**slurm(0, "n[1-2]", "1(x2)", 2), **HOSTS, **tf_config()})
    assert info is not None
    assert info.source == "TF_CONFIG"


# deploy/.


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


# Reachability.


@contextlib.contextmanager
def listener(delay: float = 0.0) -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: (time.sleep(delay), server.listen()))
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_check_reachable_tells_the_cases_apart() -> None:
    with listener() as up, listener(delay=0.5) as starting, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        addresses = tuple(f"127.0.0.1:{port}" for port in (1, up, starting, closed.getsockname()[1]))
        info = cluster.ClusterInfo("TF_CONFIG", {"worker": addresses}, "worker", 0)
        peers = cluster.check_reachable(info, timeout=1.5)
    assert [(peer.task, peer.state) for peer in peers] == [
        ("worker 1", "connected"),
        ("worker 2", "connected"),
        ("worker 3", "refused"),
    ]


def test_check_reachable_unknown_host() -> None:
    info = cluster.ClusterInfo("TF_CONFIG", {"worker": ("a:1", "no-such-host.invalid:1")}, "worker", 0)
    (peer,) = cluster.check_reachable(info, timeout=2.0)
    assert (peer.state, peer.address) == ("unknown_host", "no-such-host.invalid:1")
    assert peer.detail


def test_check_reachable_without_peers() -> None:
    assert cluster.check_reachable(LOCAL) == ()

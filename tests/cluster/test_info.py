"""tfpar.cluster: what is recognised in TF_CONFIG, what is refused and how, and that TensorFlow reads the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cluster.environments import HOSTS, slurm
from tfpar import cluster
from tfpar.cluster.__main__ import main
from tfpar.cluster.info import EXAMPLE, LOCAL
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
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "worker 1 of 2 worker (TF_CONFIG)",
        "  worker 0  a:1",
        "  worker 1  b:2  (this process)",
    ]
    monkeypatch.delenv("TF_CONFIG")
    assert main([]) == 0
    assert capsys.readouterr().out == "worker 0 of one process (local)\n"
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main([]) == exit_codes.USAGE_ERROR
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


def test_tf_config_wins_over_slurm_and_kubernetes() -> None:
    info = cluster.detect({**slurm(0, "n[1-2]", "1(x2)", 2), **HOSTS, **tf_config()})
    assert info is not None
    assert info.source == "TF_CONFIG"

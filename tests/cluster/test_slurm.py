"""Slurm: which process a step makes of a task, what is refused, and lists of hosts."""

from __future__ import annotations

from tests.cluster.environments import slurm
from tfpar import cluster
from tfpar.cluster.members import expand_hostlist
from tfpar.config import ConfigError

import pytest

pytestmark = pytest.mark.without_keras


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

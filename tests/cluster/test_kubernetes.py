"""Kubernetes: the pods of a job from a list of hosts or from the API server, and what is refused."""

from __future__ import annotations

import types

from tests.cluster.environments import HOSTS
from tfpar import cluster
from tfpar.cluster import kubernetes
from tfpar.cluster.members import Members
from tfpar.config import ConfigError

import pytest

pytestmark = pytest.mark.without_keras


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

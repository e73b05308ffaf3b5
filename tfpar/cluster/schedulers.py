"""The list of processes that a scheduler's environment describes: Slurm steps and Kubernetes jobs.

Both come down to the same `Members`: the addresses of all processes, in order, and the place of this one among
them. `tfpar.cluster` gives them their jobs. TensorFlow is imported only to ask the Kubernetes API server.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from tfpar.config import ConfigError

SLURM_PORT = 8888  # port_base of SlurmClusterResolver
KUBERNETES_PORT = 8470  # tf_server_port of KubernetesClusterResolver


@dataclasses.dataclass(frozen=True)
class Members:
    """All processes of a cluster.

    Attributes:
      source: `slurm` or `kubernetes`.
      addresses: `host:port` of every process, in order.
      rank: Which of them this one is, from 0.
    """

    source: str
    addresses: tuple[str, ...]
    rank: int


def expand_hostlist(text: str) -> list[str]:
    """Expands Slurm's notation: `n[1-2,7],m5` is n1, n2, n7, m5, in this order; zero padding is kept.

    Args:
      text: Names and bracketed ranges, separated by commas. Several brackets in one name (`r[1-2]n[1-2]`)
        and text after a bracket are understood, which TensorFlow 2.21's resolver refuses.

    Raises:
      ConfigError: A range that is not `number` or `low-high`.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        names = [""]
        for piece in re.split(r"(\[[^\]:]*\])", part.strip()):  # brackets with colons are IPv6 addresses
            is_range = piece.startswith("[") and piece.endswith("]")
            values = _expand_ranges(piece[1:-1], text) if is_range else [piece]
            names = [name + value for name in names for value in values]
        hosts += [name for name in names if name]
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    values: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise ConfigError(f"Host list {text!r}: {part!r} is not a number or a range low-high, as in 'n[1-3,7]'.")
        values += [str(n).zfill(len(match[1])) for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return values


def from_slurm(environ: Mapping[str, str]) -> Members | None:
    """The tasks of the Slurm step that this process belongs to; None outside a step or in one of a single task.

    Raises:
      ConfigError: The SLURM_* variables contradict each other.
    """
    # Parsed here and not by SlurmClusterResolver, which in TensorFlow 2.21 needs nvidia-smi (FileNotFoundError on a
    # CPU node), fails on zero GPUs per task, and sorts hosts as text (n1, n10, n2) where SLURM_PROCID counts n1, n2.
    if not {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return None
    tasks, rank = number(environ, "SLURM_STEP_NUM_TASKS"), number(environ, "SLURM_PROCID")
    if tasks <= 1:
        return None
    node_list, tasks_per_node = (environ.get(f"SLURM_STEP_{name}", "") for name in ("NODELIST", "TASKS_PER_NODE"))
    if not node_list or not tasks_per_node:
        raise ConfigError(
            f"slurm: a step of {tasks} tasks, but SLURM_STEP_NODELIST={node_list!r} and SLURM_STEP_TASKS_PER_NODE="
            f"{tasks_per_node!r}. Start the script with srun, or set TF_CONFIG."
        )
    hosts, counts = expand_hostlist(node_list), _expand_counts(tasks_per_node)
    if len(hosts) != len(counts) or sum(counts) != tasks:
        raise ConfigError(
            f"slurm: SLURM_STEP_NODELIST={node_list} ({len(hosts)} nodes) and SLURM_STEP_TASKS_PER_NODE="
            f"{tasks_per_node} ({sum(counts)} tasks) do not make SLURM_STEP_NUM_TASKS={tasks}. Start the script with "
            "srun, or set TF_CONFIG."
        )
    places = [(node, task) for node, count in enumerate(counts) for task in range(count)]
    if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        places.sort(key=lambda place: (place[1], place[0]))
    if 0 <= rank < tasks:
        _check_place(environ, rank, hosts[places[rank][0]], places[rank][1])
    base = number(environ, "TFPAR_PORT", SLURM_PORT)
    return Members("slurm", tuple(f"{hosts[node]}:{base + task}" for node, task in places), rank)


def _expand_counts(text: str) -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: {part!r} is not a count such as '2' or '2(x3)'.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _check_place(environ: Mapping[str, str], rank: int, node: str, task: int) -> None:
    """Compares the computed place with what Slurm says of this process: other distributions would cross the wires."""
    here = (environ.get("SLURMD_NODENAME", node), environ.get("SLURM_LOCALID", str(task)))
    if here != (node, str(task)):
        raise ConfigError(
            f"slurm: task {rank} runs as task {here[1]} of {here[0]}, but by the node list it would be task {task} of "
            f"{node}. Run srun with --distribution=block, or set TF_CONFIG."
        )


def from_kubernetes(environ: Mapping[str, str]) -> Members | None:
    """The pods that TFPAR_WORKER_HOSTS or TFPAR_KUBERNETES_SELECTOR name; None without either.

    Raises:
      ConfigError: It is not clear which of the pods this one is.
    """
    if environ.get("TFPAR_KUBERNETES_SELECTOR"):
        return ask_kubernetes(environ)
    text = environ.get("TFPAR_WORKER_HOSTS", "").strip()
    if not text:
        return None
    port = number(environ, "TFPAR_PORT", KUBERNETES_PORT)
    addresses = tuple(host if re.search(r":\d+$", host) else f"{host}:{port}" for host in expand_hostlist(text))
    if environ.get("JOB_COMPLETION_INDEX"):
        return Members("kubernetes", addresses, number(environ, "JOB_COMPLETION_INDEX"))
    hostname = environ.get("HOSTNAME") or socket.gethostname()
    ordinal = re.search(r"-(\d+)$", hostname.split(".")[0])
    if not ordinal:
        raise ConfigError(
            f"TFPAR_WORKER_HOSTS={text} names the members, but not which of them this is: JOB_COMPLETION_INDEX is not "
            f"set and the host name {hostname!r} does not end in -NUMBER. Use an Indexed Job or a StatefulSet, or set "
            "JOB_COMPLETION_INDEX."
        )
    return Members("kubernetes", addresses, int(ordinal[1]))


def ask_kubernetes(environ: Mapping[str, str], client: Any = None, timeout: float = 300.0) -> Members:
    """Asks the Kubernetes API server who the peers are, through TensorFlow's `KubernetesClusterResolver`.

    Needs the `kubernetes` package, a service account that may list pods of all namespaces, and pods with
    `hostNetwork: true`, one a node, because the resolver (TensorFlow 2.21) returns the node's address and not the
    pod's. An Indexed Job with TFPAR_WORKER_HOSTS needs none of these.

    Args:
      environ: TFPAR_KUBERNETES_SELECTOR (a label selector, `job-name=train`), TFPAR_NUM_WORKERS (how many pods to
        wait for), HOST_IP (this pod's node, from the downward API's `status.hostIP`), TFPAR_PORT (8470).
      client: A `CoreV1Api`; by default that of the pod's service account.
      timeout: Seconds to wait until that many pods run.

    Raises:
      ConfigError: A variable or the package is missing, or the pods do not come up in time.
    """
    missing = [name for name in ("TFPAR_NUM_WORKERS", "HOST_IP") if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"TFPAR_KUBERNETES_SELECTOR also needs {' and '.join(missing)}. TFPAR_WORKER_HOSTS, the simpler way, "
            "needs neither; see deploy/kubernetes.yaml."
        )
    selector, wanted = environ["TFPAR_KUBERNETES_SELECTOR"], number(environ, "TFPAR_NUM_WORKERS")
    port = number(environ, "TFPAR_PORT", KUBERNETES_PORT)
    addresses = _wait_for_pods(selector, wanted, port, client or _pod_client(), timeout)
    own = f"{environ['HOST_IP']}:{port}"
    if own not in addresses:
        raise ConfigError(f"HOST_IP={environ['HOST_IP']} is not among the nodes of {selector!r}: {addresses}.")
    return Members("kubernetes", tuple(addresses), addresses.index(own))


def _pod_client() -> Any:
    # KubernetesClusterResolver.cluster_spec() in TensorFlow 2.21 loads a kubeconfig file even inside a pod, where
    # there is none, unless it is given a client.
    try:
        from kubernetes import client, config  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError(
            "TFPAR_KUBERNETES_SELECTOR needs `pip install kubernetes`. TFPAR_WORKER_HOSTS, the simpler way, does not; "
            "see deploy/kubernetes.yaml."
        ) from None
    config.load_incluster_config()
    return client.CoreV1Api()


def _wait_for_pods(selector: str, wanted: int, port: int, client: Any, timeout: float) -> list[str]:
    from tensorflow.python.distribute.cluster_resolver.kubernetes_cluster_resolver import KubernetesClusterResolver

    resolver = KubernetesClusterResolver({"worker": [selector]}, tf_server_port=port, override_client=client)
    deadline = time.monotonic() + timeout
    while True:
        try:
            addresses = resolver.cluster_spec().as_dict().get("worker", [])
            if len(addresses) == wanted:
                return addresses
            seen = f"{len(addresses)} pods run"
        except RuntimeError as error:  # one of the pods does not run yet
            seen = str(error)
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"TFPAR_KUBERNETES_SELECTOR={selector}: after {timeout:g} s {seen}; TFPAR_NUM_WORKERS={wanted} are "
                "needed. Is there room for all pods at once?"
            )
        time.sleep(min(1.0, timeout))


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number in a variable, or the default where it is empty or not set.

    Raises:
      ConfigError: It is not a whole number.
    """
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number.") from None

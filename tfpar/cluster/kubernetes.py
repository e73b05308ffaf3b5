"""The pods of a Kubernetes job, from environment variables or from the API server.

TensorFlow is imported only to ask the API server.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from tfpar.cluster.members import Members, expand_hostlist, integer_variable
from tfpar.config import ConfigError

DEFAULT_PORT = 8470  # tf_server_port of KubernetesClusterResolver


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
    port = integer_variable(environ, "TFPAR_PORT", DEFAULT_PORT)
    addresses = tuple(host if re.search(r":\d+$", host) else f"{host}:{port}" for host in expand_hostlist(text))
    if environ.get("JOB_COMPLETION_INDEX"):
        return Members("kubernetes", addresses, integer_variable(environ, "JOB_COMPLETION_INDEX"))
    hostname = environ.get("HOSTNAME") or socket.gethostname()
    ordinal = re.search(r"-(\d+)$", hostname.split(".")[0])
    if not ordinal:
        raise ConfigError(
            f"TFPAR_WORKER_HOSTS={text} lists the members, but does not say which of them this process is: "
            f"JOB_COMPLETION_INDEX is not set and the host name {hostname!r} does not end in -NUMBER. Use an Indexed "
            "Job or a StatefulSet, or set JOB_COMPLETION_INDEX."
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
    selector, wanted = environ["TFPAR_KUBERNETES_SELECTOR"], integer_variable(environ, "TFPAR_NUM_WORKERS")
    port = integer_variable(environ, "TFPAR_PORT", DEFAULT_PORT)
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

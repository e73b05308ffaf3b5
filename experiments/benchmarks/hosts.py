"""What starters of benchmarks on several hosts share: the workers' environment, and lines about how far they are."""

from __future__ import annotations

import os
import sys
import time

from experiments.benchmarks.netns import Network
from tfpar.cluster import ClusterInfo, tf_config_json

PORT = 2222


def threads(network: Network) -> str:
    """Threads for each host's worker, as tfpar.launch shares out the cores."""
    return str(max(1, len(os.sched_getaffinity(0)) // len(network.namespaces)))


def tensorflow_environ(network: Network, host: int) -> dict[str, str]:
    """Environment variables of a host's worker: its place in the cluster, its threads, no GPU."""
    addresses = tuple(f"{network.address(other)}:{PORT}" for other in range(len(network.namespaces)))
    config = tf_config_json(ClusterInfo("local", {"worker": addresses}, "worker", host))
    return {"TF_CONFIG": config, "TF_NUM_INTRAOP_THREADS": threads(network), "CUDA_VISIBLE_DEVICES": "-1"}


def progress(text: str) -> None:
    """A line on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

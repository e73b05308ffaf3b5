"""What starters of benchmarks on several hosts share: the workers' environment, and lines about how far they are."""

from __future__ import annotations

import os
import sys
import time

from experiments.benchmarks import netns
from experiments.benchmarks.netns import Network
from tfpar.cluster import ClusterInfo, tf_config_json
from tfpar.process.cores import listed, share_out
from tfpar.process.heap import huge_pages

from absl import app

PORT = 2222


def threads(network: Network) -> str:
    """Threads for each host's worker, as tfpar.launch shares out the cores."""
    return str(max(1, len(os.sched_getaffinity(0)) // len(network.namespaces)))


def tensorflow_environ(network: Network, host: int) -> dict[str, str]:
    """Environment variables of a host's worker: its place in the cluster, its threads, no GPU."""
    addresses = tuple(f"{network.address(other)}:{PORT}" for other in range(len(network.namespaces)))
    config = tf_config_json(ClusterInfo("local", {"worker": addresses}, "worker", host))
    own = {"TF_CONFIG": config, "TF_NUM_INTRAOP_THREADS": threads(network), "CUDA_VISIBLE_DEVICES": "-1"}
    return {**own, **listed(own_cores(network)), **huge_pages(os.environ)}  # as the launcher does


def own_cores(network: Network) -> list[list[int]]:
    """The cores of each host's worker, as from the launcher; none if all use all."""
    return share_out(len(network.namespaces))


def can_measure(link: str = "none") -> bool:
    """Whether this machine can have hosts with such links; if not, says on standard error why.

    Args:
      link: The value of --link.

    Raises:
      absl.app.UsageError: It is not a rate.
    """
    try:
        netns.bits_per_second(link)
    except ValueError as error:
        raise app.UsageError(f"--link: {error}.") from error
    if problem := netns.missing():
        print(f"Nothing to measure: {problem}.", file=sys.stderr)
    return not problem


def progress(text: str) -> None:
    """A line on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

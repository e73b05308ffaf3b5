"""Which peers can be reached over TCP, and why the others cannot."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from tfpar import cluster
from tfpar.cluster.info import LOCAL

import pytest

pytestmark = pytest.mark.without_keras


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

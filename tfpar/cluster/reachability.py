"""Whether the peers of this process can be reached over TCP."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import socket
import time

from tfpar.cluster.info import ClusterInfo, tasks_and_addresses


@dataclasses.dataclass(frozen=True)
class Peer:
    """The result of connecting to one peer.

    Attributes:
      task: E.g. `worker 1`.
      address: Its `host:port`.
      state: `connected`; `refused` (the machine answers, nothing listens on the port yet); `unreachable` (no
        answer in time, or no route); `unknown_host` (the name does not resolve).
      detail: The operating system's words where there was an error.
      milliseconds: Of the last attempt.
    """

    task: str
    address: str
    state: str
    detail: str
    milliseconds: float


def host_and_port(address: str) -> tuple[str, int]:
    """`host:port`, checked before, in the form that sockets take: an IPv6 address without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_reachable(info: ClusterInfo, timeout: float = 3.0) -> tuple[Peer, ...]:
    """Tries to open a TCP connection to every peer, all at the same time.

    Args:
      info: The cluster; this process itself and an evaluator, which has no server, are left out.
      timeout: Seconds within which a peer must answer. A refused connection is tried again until then, as the
        peer may just be starting.

    Returns:
      One result per peer, in the order of the cluster.
    """
    own = f"{info.task_type} {info.task_index}"
    peers = [
        (task, address)
        for task, address in tasks_and_addresses(info)
        if task != own and not task.startswith("evaluator")
    ]
    if not peers:
        return ()
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(64, len(peers))) as pool:
        return tuple(pool.map(lambda peer: _connect(peer[0], peer[1], timeout), peers))


def _connect(task: str, address: str, timeout: float) -> Peer:
    deadline = time.monotonic() + timeout
    while True:
        started = time.monotonic()
        state, detail = "connected", ""
        try:
            socket.create_connection(host_and_port(address), timeout=max(0.1, deadline - started)).close()
        except OSError as error:
            refused, unknown = isinstance(error, ConnectionRefusedError), isinstance(error, socket.gaierror)
            state = "refused" if refused else "unknown_host" if unknown else "unreachable"
            detail = str(error)
        now = time.monotonic()
        if state != "refused" or now + 0.2 > deadline:
            return Peer(task, address, state, detail, (now - started) * 1e3)
        time.sleep(0.2)

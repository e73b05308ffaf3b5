"""Waiting for all workers before TensorFlow's servers start, and saying who is missing.

TensorFlow 2.21 waits for missing workers without a word, on the chief for ever, and holds Python's interpreter lock and
SIGTERM meanwhile. So the workers meet before: the chief listens for a moment on the port that will be its server's,
the others report there with their rank, and all go on once everyone has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sys
import time
from collections.abc import Sequence

from tfpar.cluster import ClusterInfo, host_and_port
from tfpar.endings import PeerLostError

_GO, _LOST = b"go\n", b"lost "
_FIRST_NOTICE_S, _NOTICE_EVERY_S = 10.0, 30.0
_RETRY_S = 0.1
_CONNECT_S = 2.0
_CLOSE_S = 5.0
_LINE_BYTES = 4096


def meet(info: ClusterInfo, timeout: float) -> None:
    """Returns when all workers have called this.

    Args:
      info: The cluster.
      timeout: Seconds to wait.

    Raises:
      PeerLostError: Not all came in that time; names those missing. Or this worker has another list of workers than the
        chief.
    """
    if info.num_workers > 1:
        (_gather if info.is_chief else _report)(info, time.monotonic() + timeout, timeout)


def names(info: ClusterInfo, ranks: Sequence[int]) -> str:
    """`worker 1 (10.0.0.2:2222), worker 3 (10.0.0.4:2222)`, the first eight."""
    found = [f"worker {rank} ({info.worker_addresses[rank]})" for rank in ranks]
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")


class _Notices:
    """Says now and then for whom this worker waits."""

    def __init__(self, info: ClusterInfo, deadline: float) -> None:
        self._info, self._deadline = info, deadline
        self._next = time.monotonic() + _FIRST_NOTICE_S

    def give(self, ranks: Sequence[int]) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _NOTICE_EVERY_S
            left = f"{max(0.0, self._deadline - now):.0f} s left (--start_timeout)"
            print(f"waiting for {names(self._info, ranks)}, {left}", file=sys.stderr, flush=True)


def _gather(info: ClusterInfo, deadline: float, timeout: float) -> None:
    """The chief's part."""
    notices = _Notices(info, deadline)
    present: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        try:
            host, port = host_and_port(info.address)
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            server = stack.enter_context(socket.create_server((host, port), family=family))
        except OSError:  # a name of this machine that is none of its own addresses, or TensorFlow tells what is wrong
            return
        server.settimeout(_RETRY_S)
        while len(present) < info.num_workers - 1:
            absent = [rank for rank in range(1, info.num_workers) if rank not in present]
            if time.monotonic() >= deadline:
                error = PeerLostError(_missing(info, absent, timeout))
                _answer(present, _LOST + str(error).encode() + b"\n")
                raise error
            notices.give(absent)
            with contextlib.suppress(OSError, ValueError):
                connection = stack.enter_context(server.accept()[0])
                rank = _admit(info, connection)
                if rank is not None:
                    present[rank] = connection
        server.close()  # the port must be free for TensorFlow's server before anybody looks for it
        _answer(present, _GO)


def _admit(info: ClusterInfo, connection: socket.socket) -> int | None:
    """Rank of the worker that reports on a new connection; None for one that does not belong here."""
    connection.settimeout(_CONNECT_S)
    greeting = json.loads(_read_line(connection))
    if greeting["cluster"] != _digest(info):
        text = "the chief has another list of workers than this one: give all the same TF_CONFIG but for the task"
        connection.sendall(_LOST + text.encode() + b"\n")
        return None
    rank = int(greeting["rank"])
    return rank if 0 < rank < info.num_workers else None


def _answer(connections: dict[int, socket.socket], line: bytes) -> None:
    """Tells all, and lets them close first: a connection closed here would keep the port busy for a minute."""
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(line)
    deadline = time.monotonic() + _CLOSE_S
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.recv(1)


def _report(info: ClusterInfo, deadline: float, timeout: float) -> None:
    """What every other worker does."""
    notices = _Notices(info, deadline)
    greeting = json.dumps({"cluster": _digest(info), "rank": info.worker_rank}).encode() + b"\n"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerLostError(_missing(info, [0], timeout))
        notices.give([0])
        answer = b""
        with contextlib.suppress(OSError):
            address = host_and_port(info.worker_addresses[0])
            with socket.create_connection(address, timeout=min(_CONNECT_S, left)) as connection:
                connection.sendall(greeting)
                connection.settimeout(max(0.01, left + _CLOSE_S))
                answer = _read_line(connection)
        if answer.startswith(_LOST):
            raise PeerLostError(answer.removeprefix(_LOST).decode(errors="replace").strip())
        if answer:  # to go on, or what TensorFlow's server says that is there already
            return
        time.sleep(_RETRY_S)  # the chief is not there yet, or was ended and comes again


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        part = connection.recv(_LINE_BYTES)
        if not part:
            break
        line += part
    return line


def _missing(info: ClusterInfo, ranks: Sequence[int], timeout: float) -> str:
    return (
        f"{names(info, ranks)} did not come within {timeout:g} s (--start_timeout). Start the same script on every "
        "machine of the cluster, or look there for an error; python -m tfpar.doctor on all of them checks addresses "
        "and connections."
    )


def _digest(info: ClusterInfo) -> str:
    return hashlib.sha256(json.dumps(info.worker_addresses).encode()).hexdigest()[:16]

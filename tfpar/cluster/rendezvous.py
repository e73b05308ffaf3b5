"""Waits for all workers before TensorFlow's servers start, and names those that are missing.

TensorFlow 2.21 waits for missing workers silently, on the chief forever, and meanwhile blocks Python's interpreter lock
and SIGTERM. So the workers, and parameter servers if there are any, meet first: the chief listens briefly on the port
of its future server, the others connect and send their place in the cluster, and all continue once everyone has joined.

Servers of `parameter_server` outlive their chief. When the chief restarts, servers that already run count as present.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import selectors
import socket
import time
from collections.abc import Sequence

from tfpar.cluster.heartbeat import probe_servers
from tfpar.cluster.info import ClusterInfo
from tfpar.cluster.reachability import host_and_port
from tfpar.process.exit_codes import PeerLostError
from tfpar.process.listing import listed

_log = logging.getLogger(__name__)

_GO, _LOST = b"go ", b"lost "
_FIRST_NOTICE_S, _NOTICE_EVERY_S = 10.0, 30.0
_RETRY_S = 0.1
_CONNECT_S = 2.0
_CLOSE_S = 5.0
_LINE_BYTES = 4096
MESSAGE_BYTES = _LINE_BYTES - len(_GO) - 1  # of the chief's message: it goes between _GO and the end of a line
_ASK_EVERY_S, _ASK_S = 2.0, 0.5
# Connections that have not said yet which process they are of, and seconds that each has to do so. A process that is
# dropped because of strangers connects again.
_MOST_PENDING, _GREETING_S = 64, 5.0


def wait_for_all(info: ClusterInfo, timeout: float, message: str = "") -> str:
    """Returns when all workers and parameter servers have called this.

    Args:
      info: The cluster.
      timeout: Seconds to wait.
      message: The chief's message to the others, one line of text of at most `MESSAGE_BYTES` bytes.

    Returns:
      The chief's message.

    Raises:
      PeerLostError: Not all joined in that time; the message names those missing. Or this process has a different list
        of workers than the chief.
    """
    if len(info.server_tasks) == 1:
        return message
    deadline = time.monotonic() + timeout
    if info.is_chief:
        _gather(info, deadline, timeout, message)
        return message
    return _report(info, deadline, timeout)


def format_tasks(info: ClusterInfo, places: Sequence[int]) -> str:
    """`worker 1 (10.0.0.2:2222), worker 3 (10.0.0.4:2222)`, the first eight, by their place in `server_tasks`."""
    return listed([f"{info.server_name(place)} ({info.server_addresses[place]})" for place in places])


class _Notices:
    """Logs every now and then which workers this one waits for."""

    def __init__(self, info: ClusterInfo, deadline: float) -> None:
        self._info, self._deadline = info, deadline
        self._next = time.monotonic() + _FIRST_NOTICE_S

    def maybe_print(self, places: Sequence[int]) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _NOTICE_EVERY_S
            left = f"{max(0.0, self._deadline - now):.0f} s left (--start_timeout)"
            _log.info("waiting for %s, %s", format_tasks(self._info, places), left)


def _gather(info: ClusterInfo, deadline: float, timeout: float, message: str) -> None:
    """Collects all other processes; runs on the chief."""
    notices = _Notices(info, deadline)
    others = range(1, len(info.server_tasks))
    serving: set[int] = set()
    ask = time.monotonic() + _ASK_EVERY_S
    with contextlib.ExitStack() as stack:
        try:
            host, port = host_and_port(info.address)
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            server = stack.enter_context(socket.create_server((host, port), family=family))
        except OSError:  # not an address of this machine: TensorFlow reports what is wrong
            return
        listener = stack.enter_context(contextlib.closing(_Listener(info, server)))
        while absent := [place for place in others if place not in listener.present and place not in serving]:
            if time.monotonic() >= deadline:
                error = PeerLostError(_missing(info, absent, timeout))
                _reply(listener.present, _LOST + str(error).encode() + b"\n")
                raise error
            notices.maybe_print(absent)
            if info.num_ps and time.monotonic() >= ask:
                answers = probe_servers([info.server_addresses[place] for place in absent], _ASK_S)
                serving.update(place for place, answered in zip(absent, answers, strict=True) if answered)
                ask = time.monotonic() + _ASK_EVERY_S
            listener.serve(_RETRY_S)
        server.close()  # the port must be free for TensorFlow's server before anybody looks for it
        _reply(listener.present, _GO + message.encode() + b"\n")


@dataclasses.dataclass
class _Greeting:
    """What has come over a connection so far, and until when the rest must come."""

    line: bytes
    deadline: float


class _Listener:
    """Accepts the connections of the other tasks. A foreign connection never delays the others, whatever it sends.

    Attributes:
      present: Connections of the processes that have joined and have not ended since, by their place.
    """

    def __init__(self, info: ClusterInfo, server: socket.socket) -> None:
        self.present: dict[int, socket.socket] = {}
        self._info, self._server = info, server
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._partial: dict[socket.socket, _Greeting] = {}  # the oldest first

    def serve(self, seconds: float) -> None:
        """Handles pending connections, or waits up to `seconds` for one."""
        for key, _ in self._selector.select(seconds):
            with contextlib.suppress(OSError):
                if key.fileobj is self._server:
                    self._accept_connection(seconds)
                elif key.fileobj in self._partial:
                    self._read_greeting(key.fileobj)
                elif isinstance(key.fileobj, socket.socket):
                    self._drop_if_ended(key.fileobj)

        now = time.monotonic()
        while self._partial and next(iter(self._partial.values())).deadline <= now:
            self._drop_oldest()

    def _accept_connection(self, seconds: float) -> None:
        try:
            connection = self._server.accept()[0]
        except OSError:  # this process may have no descriptor left
            if not self._partial:
                time.sleep(seconds)  # the selector reports the same connection at once
                return
            self._drop_oldest()
            connection = self._server.accept()[0]
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._partial[connection] = _Greeting(b"", time.monotonic() + _GREETING_S)
        if len(self._partial) > _MOST_PENDING:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        connection = next(iter(self._partial))
        del self._partial[connection]
        self._close(connection)

    def close(self) -> None:
        """Closes all connections."""
        for connection in [*self.present.values(), *self._partial]:
            connection.close()
        self._selector.close()

    def _read_greeting(self, connection: socket.socket) -> None:
        try:
            part = connection.recv(_LINE_BYTES)
        except OSError:
            part = b""
        self._partial[connection].line += part
        line = self._partial[connection].line
        if part and not line.endswith(b"\n") and len(line) < _LINE_BYTES:
            return
        del self._partial[connection]
        connection.settimeout(_CONNECT_S)
        place = self._accept(connection, line)
        # A process that was restarted meanwhile replaces its earlier connection.
        ended = connection if place is None else self.present.pop(place, None)
        if ended is not None:
            self._close(ended)
        if place is not None:
            self.present[place] = connection

    def _drop_if_ended(self, connection: socket.socket) -> None:
        """Drops a process that has joined, if it has closed its connection: it sends nothing while it waits."""
        place = next((place for place, other in self.present.items() if other is connection), None)
        if place is None:  # replaced since the selector reported it
            return
        try:
            ended = not connection.recv(_LINE_BYTES)
        except OSError:
            ended = True
        if ended:
            _log.warning("%s joined and has ended since; it may join again", format_tasks(self._info, [place]))
            self._close(self.present.pop(place))

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _accept(self, connection: socket.socket, line: bytes) -> int | None:
        """The place that a process sent over a connection; None if it is not a process of this cluster."""
        try:
            greeting = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(greeting, dict) or not isinstance(greeting.get("cluster"), str):
            return None
        if greeting["cluster"] != _digest(self._info):
            text = "the chief has a different list of workers: give all processes the same TF_CONFIG, except for `task`"
            with contextlib.suppress(OSError):
                _log.warning("%s reported a different worker list and was rejected", connection.getpeername()[0])
                connection.sendall(_LOST + text.encode() + b"\n")
            return None
        place = greeting.get("place")
        return place if type(place) is int and 0 < place < len(self._info.server_tasks) else None


def _reply(connections: dict[int, socket.socket], line: bytes) -> None:
    """Sends a line to all and lets them close first: a connection closed here would keep the port busy for a minute."""
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(line)
    deadline = time.monotonic() + _CLOSE_S
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.recv(1)


def _report(info: ClusterInfo, deadline: float, timeout: float) -> str:
    """Reports to the chief and waits for its answer; runs in every other process. Returns the chief's message."""
    notices = _Notices(info, deadline)
    greeting = json.dumps({"cluster": _digest(info), "place": _place(info)}).encode() + b"\n"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerLostError(_missing(info, [0], timeout))
        notices.maybe_print([0])
        answer = b""
        with contextlib.suppress(OSError):
            address = host_and_port(info.worker_addresses[0])
            with socket.create_connection(address, timeout=min(_CONNECT_S, left)) as connection:
                connection.sendall(greeting)
                connection.settimeout(max(0.01, left + _CLOSE_S))
                answer = _read_line(connection)
        if answer.startswith(_LOST):
            raise PeerLostError(answer.removeprefix(_LOST).decode(errors="replace").strip())
        if answer:  # the signal to continue, or the greeting of TensorFlow's server, which runs already
            return answer.removeprefix(_GO).decode().rstrip("\n") if answer.startswith(_GO) else ""
        time.sleep(_RETRY_S)  # the chief has not started yet, or is being restarted


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
        part = connection.recv(_LINE_BYTES)
        if not part:
            break
        line += part
    return line


def _missing(info: ClusterInfo, places: Sequence[int], timeout: float) -> str:
    return (
        f"{format_tasks(info, places)} did not join within {timeout:g} s (--start_timeout). Start the same script on "
        "every machine of the cluster, or look there for an error; python -m tfpar.doctor on all of them checks "
        "addresses and connections."
    )


def _place(info: ClusterInfo) -> int:
    own = (info.task_type, info.task_index)
    return info.server_tasks.index(own) if own in info.server_tasks else -1


def _digest(info: ClusterInfo) -> str:
    return hashlib.sha256(json.dumps(info.server_addresses).encode()).hexdigest()[:16]

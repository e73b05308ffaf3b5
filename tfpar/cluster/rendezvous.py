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
import os
import selectors
import socket
import time
from collections.abc import Sequence

from tfpar.cluster import port_filter
from tfpar.cluster.heartbeat import probe_servers
from tfpar.cluster.info import ClusterInfo
from tfpar.cluster.reachability import host_and_port
from tfpar.config import ConfigError
from tfpar.config.errors import TrainingError
from tfpar.process.exit_codes import PeerLostError
from tfpar.process.listing import listed
from tfpar.process.safe_write import shortened

_log = logging.getLogger(__name__)

_GO, _LOST, _REFUSED = b"go ", b"lost ", b"refused "
BIND_ERROR = "Could not start gRPC server"  # what TensorFlow 2.21 says if it cannot open its port
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
      PeerLostError: Not all joined in that time; the message names those missing. On Kubernetes, also if this process
        has a different list of workers than the chief.
      ConfigError: Elsewhere, if this process has a different list of workers than the chief.
      TrainingError: This process is the chief and cannot listen on its port.
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


def port_error(info: ClusterInfo, reason: str) -> TrainingError:
    """The error of a process that cannot listen on its port. A restart would not help while another program does.

    Args:
      info: The cluster.
      reason: The reason, in the words of the operating system or of TensorFlow.
    """
    _, port = host_and_port(info.address)
    variable = {"slurm": "TFPAR_PORT", "kubernetes": "TFPAR_WORKER_HOSTS or TFPAR_PORT"}.get(info.source, "TF_CONFIG")
    if BIND_ERROR not in reason:
        reason += f" ({BIND_ERROR})"  # by which the local launcher recognises it, and chooses other ports
    return TrainingError(
        f"{format_tasks(info, [_place(info)])} cannot listen on port {port} of its machine: {reason}. End the program "
        f"that listens there (`ss -ltnp sport = :{port}` shows it), or name another port in {variable}, for all "
        "processes alike."
    )


class _Notices:
    """Logs every now and then which workers this one waits for."""

    def __init__(self, info: ClusterInfo, deadline: float) -> None:
        self._info, self._deadline = info, deadline
        self._next = time.monotonic() + _FIRST_NOTICE_S

    def maybe_print(self, places: Sequence[int], remark: str = "") -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _NOTICE_EVERY_S
            left = f"{max(0.0, self._deadline - now):.0f} s left (--start_timeout)"
            _log.info("waiting for %s, %s%s", format_tasks(self._info, places), left, remark and f"; {remark}")


def _listen(info: ClusterInfo) -> socket.socket:
    """Listens on the port of this process where TensorFlow's server will: on all addresses of the machine.

    The others may reach this machine by an address that its own name does not stand for here: Debian resolves it to
    127.0.1.1, and the address of a Kubernetes service is none of the machine's. As for TensorFlow's server, packets to
    other addresses than its own are dropped if the name stands for some.

    Raises:
      TrainingError: The port cannot be opened.
    """
    host, port = host_and_port(info.address)
    both = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
    except OSError as error:
        raise port_error(info, os.strerror(error.errno) if error.errno else str(error)) from error
    with contextlib.suppress(port_filter.StillOpenError):
        port_filter.attach(server.fileno(), port_filter.own_addresses(host))
    return server


def _gather(info: ClusterInfo, deadline: float, timeout: float, message: str) -> None:
    """Collects all other processes; runs on the chief."""
    notices = _Notices(info, deadline)
    others = range(1, len(info.server_tasks))
    serving: set[int] = set()
    ask = time.monotonic() + _ASK_EVERY_S
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(info))
        listener = stack.enter_context(contextlib.closing(_Listener(info, server)))
        while absent := [place for place in others if place not in listener.present and place not in serving]:
            if time.monotonic() >= deadline:
                error = PeerLostError(_missing(info, absent, timeout) + listener.describe_twins())
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
        self._processes: dict[int, str] = {}  # which process has joined last, by its place
        self._twins: dict[int, tuple[str, str]] = {}

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
        joined = self._accept(connection, line)
        if joined is None:
            self._close(connection)
            return
        place, process = joined
        # A process that was restarted meanwhile replaces its earlier connection.
        if (earlier := self.present.pop(place, None)) is not None:
            if process != self._processes[place] and _is_open(earlier):
                self._report_twins(place, self._processes[place], process)
            self._close(earlier)
        self.present[place], self._processes[place] = connection, process

    def _report_twins(self, place: int, first: str, second: str) -> None:
        if place not in self._twins:
            self._twins[place] = first, second
            _log.warning("%s", self._describe_twins(place))

    def _describe_twins(self, place: int) -> str:
        name, (first, second) = self._info.server_name(place), self._twins[place]
        return f"two processes say that they are {name}, {first} and {second}: give each its own task index"

    def describe_twins(self) -> str:
        """Sentences about the places that several processes say they have, to append to an error; empty if none."""
        sentences = [self._describe_twins(place) for place in sorted(self._twins)]
        return "".join(f" {sentence[0].upper()}{sentence[1:]}." for sentence in sentences)

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

    def _accept(self, connection: socket.socket, line: bytes) -> tuple[int, str] | None:
        """The place that a process sent over a connection, and which process it is; None if it is no member."""
        try:
            greeting = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(greeting, dict) or not isinstance(greeting.get("cluster"), str):
            return None
        try:
            machine = connection.getpeername()[0].removeprefix("::ffff:")  # IPv4 over a socket for both
            if greeting["cluster"] != _digest(self._info):
                _log.warning("%s reported a different worker list and was rejected", machine)
                connection.sendall(_REFUSED + f"{_other_list(self._info)}\n".encode())
                return None
        except OSError:  # it has ended
            return None
        place, process = greeting.get("place"), greeting.get("process")
        if type(place) is not int or not 0 < place < len(self._info.server_tasks):
            return None
        return place, f"{machine} (process {process})" if type(process) is int else machine


def _is_open(connection: socket.socket) -> bool:
    """Whether the process at the other end, which sends nothing while it waits, has not closed a connection."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


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
    own = {"cluster": _digest(info), "place": _place(info), "process": os.getpid()}
    greeting = json.dumps(own).encode() + b"\n"
    stranger = ""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerLostError(_missing(info, [0], timeout) + (stranger and f" When this worker asked, {stranger}."))
        notices.maybe_print([0], stranger)
        answer = b""
        with contextlib.suppress(OSError):
            address = host_and_port(info.worker_addresses[0])
            with socket.create_connection(address, timeout=min(_CONNECT_S, left)) as connection:
                connection.sendall(greeting)
                connection.settimeout(max(0.01, left + _CLOSE_S))
                answer = _read_line(connection)
        if answer.startswith(_LOST):
            raise PeerLostError(_text(answer, _LOST))
        if answer.startswith(_REFUSED):
            # Pods that moved since one of the two asked for the list are in both if this process starts again.
            raise (PeerLostError if info.source == "kubernetes" else ConfigError)(_text(answer, _REFUSED))
        if answer.startswith(_GO):
            return _text(answer, _GO)
        if not answer:
            time.sleep(_RETRY_S)  # the chief has not started yet, or is being restarted
        elif probe_servers(info.worker_addresses[:1], min(_CONNECT_S, left))[0]:
            return ""  # TensorFlow's server of the chief, which runs already
        else:
            said = repr(shortened(answer.decode(errors="replace").strip(), 60))
            stranger = f"something else than a worker of tfpar answered on the chief's port: {said}"
            time.sleep(_ASK_EVERY_S)


def _text(answer: bytes, kind: bytes) -> str:
    return answer.removeprefix(kind).decode(errors="replace").rstrip("\n")


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


def _other_list(info: ClusterInfo) -> str:
    variables = "TFPAR_* variables" if info.source in ("slurm", "kubernetes") else "TF_CONFIG, except for `task`"
    return f"the chief has a different list of workers: give all processes the same {variables}"

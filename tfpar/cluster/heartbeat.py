"""Probes TensorFlow's servers in other processes, for clusters whose tasks do not send heartbeats to each other.

TensorFlow 2.21 has no such check for parameter servers: its health check of peers is for collectives only, and its call
to a server has no time limit. That call is plain gRPC, WorkerService/GetStatus; this module sends it with a time limit.
A process that is stopped (SIGSTOP) still accepts the connection, because the kernel does, but does not answer.

A separate process, which runs this module as a program, sends the probes. TensorFlow 2.21 sends every new function to
all workers, and holds Python's lock until they have answered: until then no Python thread of the chief runs, so that
none could report the lost worker.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from tfpar.process.exit_codes import PEER_LOST, exit_peer_lost
from tfpar.process.listing import listed

import grpc

_log = logging.getLogger(__name__)

_METHOD = "/tensorflow.WorkerService/GetStatus"
# Names in TF_CONFIG are machines of the cluster: a proxy for outside connections must not be used. Each probe has a new
# connection, because gRPC refuses one that has failed for a while without trying.
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))

# A process is lost after this many unanswered probes in a row, of the number sent per timeout.
_MISSES = 4
_PROBES = 5
# Seconds that the watched process gets to end in Python, with its logs written, and then from native code.
_GRACE_S = 3.0


def probe_servers(addresses: Sequence[str], timeout: float) -> list[bool]:
    """Asks TensorFlow's servers whether they answer, all at the same time.

    Args:
      addresses: `host:port` of each.
      timeout: Seconds within which they must answer.

    Returns:
      Whether each did.
    """
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(address, options=_OPTIONS)) for address in addresses]
        calls = [channel.unary_unary(_METHOD).future(b"", timeout=timeout) for channel in channels]
        return [call.exception() is None for call in calls]


def start_heartbeat(
    servers: Mapping[str, str], *, peer_timeout: float, start_timeout: float, text: str, core: ctypes.CDLL | None = None
) -> None:
    """Probes servers until this process ends, and ends it with one line and exit code 75 once one does not answer.

    Unanswered probes count, not time, so that a machine that was suspended for a while does not consider its peers
    lost.

    Args:
      servers: The name of each, and its `host:port`.
      peer_timeout: Seconds after which a server that does not answer is lost.
      start_timeout: The same for a server that has not answered yet.
      text: The line, with `{}` where the names of the lost servers belong.
      core: The functions of the native library, to end a process whose Python does not run. Without it such a process
        is killed, after the line.
    """
    told, tell = os.pipe()
    watcher = subprocess.Popen(
        # With the packages of this process, wherever they come from.
        [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as h; h.main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[tell],
        text=True,
        start_new_session=True,  # Ctrl-C and a launcher's SIGTERM are for the run, which ends it
    )
    os.close(tell)
    if core is None or core.tfpar_end_on_message(told, PEER_LOST) != 0:
        os.close(told)
    assert watcher.stdin is not None
    order = {"servers": dict(servers), "peer_timeout": peer_timeout, "start_timeout": start_timeout, "text": text}
    with contextlib.suppress(BrokenPipeError):
        watcher.stdin.write(json.dumps({**order, "tell": tell, "watched": os.getpid()}) + "\n")
        watcher.stdin.flush()
    done = threading.Event()

    def listen() -> None:
        assert watcher.stdout is not None
        line = watcher.stdout.readline()
        if line and not done.is_set():
            exit_peer_lost(line.rstrip("\n"))
        if not done.is_set():
            _log.warning("the process that probes the other tasks has ended: this chief will not notice their loss")

    threading.Thread(target=listen, name="heartbeat", daemon=True).start()

    def stop() -> None:
        done.set()
        watcher.kill()
        watcher.wait()

    atexit.register(stop)


def main() -> None:
    """Probes servers as the process asks that started this one, until that ends or one of them is lost."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with, args=(sys.stdin,), daemon=True).start()
    lost = _first_lost(order["servers"], peer_timeout=order["peer_timeout"], start_timeout=order["start_timeout"])
    line = order["text"].format(listed(lost))
    print(line, flush=True)
    time.sleep(_GRACE_S)
    # It has not ended, or this process would have. The lines of its log begin with `error: ` too.
    with contextlib.suppress(BrokenPipeError):
        os.write(order["tell"], f"error: {line}\n".encode())
        time.sleep(_GRACE_S)
    os.write(2, f"error: {line}\n".encode())
    if os.getppid() == order["watched"]:
        os.kill(order["watched"], signal.SIGKILL)


def _end_with(stream: IO[str]) -> None:
    """Ends this process when the one at the other end of its standard input is gone."""
    stream.read()
    os._exit(0)


def _first_lost(servers: Mapping[str, str], *, peer_timeout: float, start_timeout: float) -> list[str]:
    """Probes until servers are lost, and returns their names."""
    period = peer_timeout / _PROBES
    limit = dict.fromkeys(servers, max(_MISSES, math.ceil(start_timeout / period)))
    misses = dict.fromkeys(servers, 0)
    while True:
        began = time.monotonic()
        for name, answers in zip(servers, probe_servers(list(servers.values()), period), strict=True):
            misses[name] = 0 if answers else misses[name] + 1
            if answers:
                limit[name] = _MISSES
        silent = [name for name in servers if misses[name] >= limit[name]]
        if silent:
            return silent
        time.sleep(max(0.0, period - (time.monotonic() - began)))

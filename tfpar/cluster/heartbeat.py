"""Probes TensorFlow's servers in other processes, for clusters whose tasks do not send heartbeats to each other.

TensorFlow 2.21 has nothing for parameter servers: its check of a peer's health is for collectives only, and the call
that asks any server has no time limit. That call is plain gRPC, WorkerService/GetStatus, and is sent here with a time
limit. A process that is stopped (SIGSTOP) still accepts the connection, because the kernel does, but does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import grpc

_METHOD = "/tensorflow.WorkerService/GetStatus"
# Names in TF_CONFIG are machines of the cluster: a proxy for outside connections must not be used. Each probe has a new
# connection, because gRPC refuses one that has failed for a while without trying.
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))

# A process is lost after this many unanswered probes in a row, of the number sent per timeout.
_MISSES = 4
_PROBES = 5
_CLOSE_S = 1.0

# ParameterServerStrategy of TensorFlow 2.21 sets these while the thread below probes, and gRPC reads the environment
# for every channel. A new variable moves the C library's list under the reader's feet; one that exists is replaced in
# its place.
_SET_BY_STRATEGY = {
    "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "False",
    "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": "True",
}


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
    servers: Mapping[str, str], *, peer_timeout: float, start_timeout: float, lost: Callable[[list[str]], None]
) -> None:
    """Probes servers from a thread, until this process ends.

    Unanswered probes count, not time, so that a process that was itself stopped for a while does not consider its peers
    lost.

    Args:
      servers: The name of each, and its `host:port`.
      peer_timeout: Seconds after which a server that does not answer is lost.
      start_timeout: The same for a server that has not answered yet.
      lost: Called once, from that thread, with the names of the lost servers.
    """
    os.environ.update(_SET_BY_STRATEGY)
    done = threading.Event()
    period = peer_timeout / _PROBES
    limit = dict.fromkeys(servers, max(_MISSES, math.ceil(start_timeout / period)))
    misses = dict.fromkeys(servers, 0)

    def probe() -> None:
        while not done.is_set():
            began = time.monotonic()
            for name, answers in zip(servers, probe_servers(list(servers.values()), period), strict=True):
                misses[name] = 0 if answers else misses[name] + 1
                if answers:
                    limit[name] = _MISSES
            silent = [name for name in servers if misses[name] >= limit[name]]
            if silent and not done.is_set():
                lost(silent)
                return
            done.wait(max(0.0, period - (time.monotonic() - began)))

    thread = threading.Thread(target=probe, name="heartbeat", daemon=True)
    thread.start()

    def stop() -> None:
        done.set()
        thread.join(_CLOSE_S)

    atexit.register(stop)

"""Whether TensorFlow's servers in other processes answer: for clusters whose tasks do not send each other heartbeats.

TensorFlow 2.21's own means do not fit parameter servers: its check of a peer's health is for collectives only, and the
call that asks any server has no time limit. What that call sends is plain gRPC, WorkerService/GetStatus, and is sent
here with one. A process that is stopped takes the connection (the kernel does) but does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import grpc

_METHOD = "/tensorflow.WorkerService/GetStatus"
# A name in TF_CONFIG is that of a machine of the cluster: never by way of a proxy for the world outside. Every question
# has a connection of its own, for one that failed before would be refused for a while without a try.
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))

# Of so many questions in a row, spread over less than the bound, none was answered.
_MISSES = 4
_QUESTIONS = 5
_CLOSE_S = 1.0


def answering(addresses: Sequence[str], timeout: float) -> list[bool]:
    """Asks TensorFlow's servers, all at the same time.

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


def watch(
    servers: Mapping[str, str], *, peer_timeout: float, start_timeout: float, lost: Callable[[list[str]], None]
) -> None:
    """Asks servers from a thread of its own, until this process ends.

    It is questions without an answer that count, not time, so that a process that was itself stopped for a while does
    not take its peers for lost.

    Args:
      servers: What to call each, and its `host:port`.
      peer_timeout: Seconds after which one that does not answer is lost.
      start_timeout: The same for one that has not answered yet.
      lost: Called once with the names of those lost, from that thread.
    """
    done = threading.Event()
    period = peer_timeout / _QUESTIONS
    limit = dict.fromkeys(servers, max(_MISSES, math.ceil(start_timeout / period)))
    misses = dict.fromkeys(servers, 0)

    def ask() -> None:
        while not done.is_set():
            began = time.monotonic()
            for name, answers in zip(servers, answering(list(servers.values()), period), strict=True):
                misses[name] = 0 if answers else misses[name] + 1
                if answers:
                    limit[name] = _MISSES
            silent = [name for name in servers if misses[name] >= limit[name]]
            if silent and not done.is_set():
                lost(silent)
                return
            done.wait(max(0.0, period - (time.monotonic() - began)))

    thread = threading.Thread(target=ask, name="health", daemon=True)
    thread.start()

    def stop() -> None:
        done.set()
        thread.join(_CLOSE_S)

    atexit.register(stop)

"""Bringing the native transport up between the workers of a cluster, and finding out who is lost.

The workers exchange their addresses, and a random token of the run, through the key-value store of TensorFlow's
coordination service, which the chief has while a multi-worker strategy runs. A worker has one port, of the address that
the cluster description (TF_CONFIG) names for it alone, which is closed as soon as all are connected. Connections that
do not know the token are dropped before anything else of them is read (tfpar_ops/transport/doorway.h).
"""

from __future__ import annotations

import atexit
import inspect
import logging
import secrets
import threading
import time
from collections.abc import Sequence

from tfpar.cluster import heartbeat
from tfpar.cluster.info import ClusterInfo
from tfpar.cluster.reachability import host_and_port
from tfpar.collectives.gloo import GlooGroup
from tfpar.collectives.tensorflow import use_for_cpus
from tfpar.config import ConfigError
from tfpar.process.exit_codes import PeerLostError
from tfpar_ops.transport_library import MeshError, TransportLibrary, transport_library, why_unusable

import tensorflow as tf
from tensorflow.python.eager import context

_log = logging.getLogger(__name__)

_PREFIX = "tfpar/transport"
# As hexadecimal digits: half of them go in each direction.
_TOKEN_BYTES = 32
_CONNECT_S = 20.0
_ASK_S = 1.0

# A call that has been under way for the first share of the peer time-out makes its worker ask all others. Those that
# leave three questions in a row unanswered, each for the second share, are lost. The rest is for the report.
_QUIET_SHARE, _ASK_SHARE, _MISSES = 0.1, 0.2, 3
_POLL_S = 0.5


def check_usable(what: str) -> None:
    """Refuses the transport where its library cannot be used.

    Args:
      what: The flag and its value.

    Raises:
      ConfigError: With the reason and what to do.
    """
    if reason := why_unusable():
        raise ConfigError(
            f"{what}: the library of the transport cannot be used: {reason} Or use --transport=tensorflow."
        )


def announce(info: ClusterInfo, transport: str) -> None:
    """Tells the other workers which transport this one uses.

    Args:
      info: The cluster, whose multi-worker strategy runs.
      transport: `tensorflow` or `gloo`.
    """
    context.context().set_config_key_value(f"{_PREFIX}/of/{info.worker_rank}", transport)


def connect(info: ClusterInfo, *, peer_timeout: float, start_timeout: float) -> None:
    """Connects all workers, each of which must call this. Groups of CPUs use the connections from then on.

    Args:
      info: The cluster, whose multi-worker strategy runs.
      peer_timeout: Seconds within which a worker that does not answer is reported as lost.
      start_timeout: Seconds to wait for the others.

    Raises:
      ConfigError: The worker's address is not one of this machine; or another worker uses another transport.
      PeerLostError: No connection, with the name of the worker.
    """
    deadline = time.monotonic() + start_timeout
    announce(info, "gloo")
    others = _ask_all(info, f"{_PREFIX}/of", deadline)
    if different := [rank for rank, other in enumerate(others) if other != "gloo"]:
        raise ConfigError(
            f"--transport: worker {info.worker_rank} has gloo, worker {different[0]} has {others[different[0]]}. Give "
            "all workers the same."
        )
    library = transport_library()
    mesh, error = _bring_up(library, info, deadline)
    if error:
        library.close(mesh)
        raise PeerLostError(f"--transport=gloo: the workers could not be connected: {error}.")
    atexit.register(library.close, mesh)
    _Watch(library, mesh, info, peer_timeout).start()

    def make(members: tuple[int, ...], rank: int, workers: tuple[int, ...], *, all_workers: bool) -> GlooGroup:
        return GlooGroup(members, rank, mesh, workers, all_workers)

    use_for_cpus(make)


def _bring_up(library: TransportLibrary, info: ClusterInfo, deadline: float) -> tuple[int, str]:
    """Connects all workers; returns the number of the mesh, and what went wrong on any of them."""
    rank, store = info.worker_rank, context.context()
    if rank == 0:
        store.set_config_key_value(f"{_PREFIX}/token", secrets.token_hex(_TOKEN_BYTES))
    token = _ask(f"{_PREFIX}/token", deadline, "worker 0")
    host, _ = host_and_port(info.worker_addresses[rank])
    try:
        mesh = library.listen(rank, _names(info), host, token, _CONNECT_S)
    except MeshError as error:
        raise ConfigError(
            f"--transport=gloo listens on this worker's address in {info.source}, {host}, which is not one of this "
            f"machine ({error}). Name an address of the machine there, or use --transport=tensorflow."
        ) from error
    store.set_config_key_value(f"{_PREFIX}/address/{rank}", library.address(mesh))
    addresses = _ask_all(info, f"{_PREFIX}/address", deadline)
    result = ""
    try:
        library.connect(mesh, addresses)
    except MeshError as error:
        result = f"worker {rank} and {error}"
    if dropped := library.dropped(mesh):
        _log.warning(
            "%d connections to this worker did not know the run's token and were dropped: see docs/security.md", dropped
        )
    store.set_config_key_value(f"{_PREFIX}/result/{rank}", result or "connected")
    results = _ask_all(info, f"{_PREFIX}/result", deadline)
    return mesh, next((result for result in results if result != "connected"), "")


def _names(info: ClusterInfo) -> list[str]:
    """TensorFlow's names of the workers, which `failure.find_lost` looks for in errors."""
    return [
        f"/job:{job}/replica:0/task:{index} ({address})"
        for (job, index), address in zip(info.worker_tasks, info.worker_addresses, strict=True)
    ]


def _ask_all(info: ClusterInfo, prefix: str, deadline: float) -> list[str]:
    return [_ask(f"{prefix}/{rank}", deadline, f"worker {rank}") for rank in range(info.num_workers)]


def _ask(key: str, deadline: float, who: str) -> str:
    """The value that another worker has set, or sets in time.

    Raises:
      PeerLostError: It does not.
    """
    ask = context.context().get_config_key_value
    # TensorFlow 2.19 knows no time limit, and has one of its own. The call holds Python's lock: ask for short.
    limit = (round(1e3 * _ASK_S),) if "timeout_in_ms" in inspect.signature(ask).parameters else ()
    while True:
        try:
            return str(ask(key, *limit))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError) as error:
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"--transport=gloo: {who} did not say how it can be reached in time (--start_timeout). Its log "
                    "tells why."
                ) from error
            time.sleep(0.05)


class _Watch(threading.Thread):
    """Ends the calls of this worker once another one does not answer. A connection that breaks ends them by itself.

    Args:
      library: Of the transport.
      mesh: Number of the mesh.
      info: The cluster.
      peer_timeout: Seconds within which the loss is reported.
    """

    def __init__(self, library: TransportLibrary, mesh: int, info: ClusterInfo, peer_timeout: float) -> None:
        super().__init__(name="transport-watch", daemon=True)
        self._library, self._mesh = library, mesh
        self._others = [rank for rank in range(info.num_workers) if rank != info.worker_rank]
        self._addresses = [info.worker_addresses[rank] for rank in self._others]
        self._names = [_names(info)[rank] for rank in self._others]
        self._quiet, self._ask = _QUIET_SHARE * peer_timeout, _ASK_SHARE * peer_timeout
        # Not all workers ask in the same moment: they may be many.
        self._pause = _POLL_S * (1 + 0.1 * secrets.randbelow(10))

    def run(self) -> None:
        """Asks until someone is lost."""
        misses = [0] * len(self._others)
        while True:
            time.sleep(self._pause)
            if self._library.waiting_seconds(self._mesh) < self._quiet:
                misses = [0] * len(self._others)
                continue
            began = time.monotonic()
            answers = heartbeat.probe_servers(self._addresses, self._ask)
            misses = [0 if answers[place] else count + 1 for place, count in enumerate(misses)]
            if silent := [name for name, count in zip(self._names, misses, strict=True) if count >= _MISSES]:
                self._library.abort(self._mesh, _silent_text(silent))
                return
            time.sleep(max(0.0, self._ask - (time.monotonic() - began)))


def _silent_text(names: Sequence[str]) -> str:
    return f"lost {', '.join(names)}: no answer"

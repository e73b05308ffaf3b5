"""Connects the workers of a cluster over the native transport, and detects lost workers.

The workers exchange their addresses, and a random token of the run, through the key-value store of TensorFlow's
coordination service, which the chief runs while a multi-worker strategy is active. A worker listens on one port, only
on the address that the cluster description (TF_CONFIG) names for it. The port is closed as soon as all workers are
connected. Connections without the token are dropped before anything else of them is read
(tfpar_ops/transport/peer_listener.h).
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import ipaddress
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from tfpar.cluster import heartbeat, own_failure, port_filter
from tfpar.cluster.info import ClusterInfo
from tfpar.cluster.reachability import host_and_port
from tfpar.collectives.gloo import GlooGroup, PipelinedGlooGroup
from tfpar.collectives.tensorflow import MakeGroup, has_nccl, use_transport
from tfpar.config import ConfigError
from tfpar.process.exit_codes import PeerLostError
from tfpar_ops import uses_library
from tfpar_ops.transport_library import MeshError, TransportLibrary, transport_library, why_unusable

import tensorflow as tf
from tensorflow.python.eager import context

_log = logging.getLogger(__name__)

_PREFIX = "tfpar/transport"
# Sent as hexadecimal digits, half of them in each direction.
_TOKEN_BYTES = 32
_CONNECT_S = 20.0
_NOWHERE = "none"  # in place of the address of a worker that cannot listen
_ASK_S = 1.0
_PROBE_S = 5.0  # for a worker that others wait for; one that has ended refuses the connection at once
_GPUS = "GPUs that NCCL cannot connect", "GPUs"

# If a call takes longer than the first share of the peer timeout, its worker probes all others. A worker that does not
# answer three probes in a row is lost. Each has the second share, or less: `_REPORT_S` is for the report, in which
# another worker may have to find out who was lost (`failure.find_lost`).
_QUIET_SHARE, _ASK_SHARE, _MISSES = 0.1, 0.2, 3
_REPORT_S, _LEAST_ASK_S = 6.0, 0.75
_POLL_S = 0.2
# Of the peer timeout, after which a connection is lost on which the machine of a peer does not answer.
_SILENCE_SHARE = 0.4


def check_usable(what: str) -> None:
    """Raises an error if the library of the transport cannot be used.

    Args:
      what: The flag and its value.

    Raises:
      ConfigError: With the reason and what to do.
    """
    if reason := why_unusable():
        raise ConfigError(
            f"{what}: the library of the transport cannot be used: {reason} Or use --transport=tensorflow."
        )


def check_address(what: str, info: ClusterInfo) -> None:
    """Raises an error if the other workers could not reach this one on the address on which it would listen.

    Args:
      what: The flag and its value.
      info: The cluster.

    Raises:
      ConfigError: With the reason and what to do. An address that is none of this machine's is refused later, when it
        is listened on: a name may not resolve yet.
    """
    try:
        _usable_addresses(info)
    except port_filter.LoopbackNameError as reason:
        raise ConfigError(
            f"{what}: this worker cannot listen on its own address: {reason}. Name another address of this machine in "
            f"{info.source}, or use --transport=tensorflow."
        ) from reason
    except port_filter.StillOpenError:
        return


def obstacle(info: ClusterInfo) -> str:
    """The reason why this worker cannot use the transport, as far as it is known before connecting; empty if it can.

    Args:
      info: The cluster.
    """
    if reason := why_unusable():
        return reason.split(". ")[0].rstrip(".")
    try:
        _usable_addresses(info)
    except port_filter.StillOpenError as reason:
        return f"it cannot listen on its own address: {reason}"
    return ""


def _usable_addresses(info: ClusterInfo) -> list[port_filter.Address]:
    """The addresses of this worker on which others reach it; none if that is over loopback, on the same machine.

    Raises:
      StillOpenError: There is none.
    """
    hosts = {host_and_port(address)[0] for address in info.worker_addresses}
    try:
        return port_filter.own_addresses(host_and_port(info.address)[0], {})
    except port_filter.LoopbackNameError:
        if len(hosts) == 1:
            return []
        raise


def listening_host(info: ClusterInfo) -> str:
    """The name or address on which this worker listens: of a name with several addresses, one that others reach."""
    host, _ = host_and_port(info.address)
    try:
        usable = _usable_addresses(info)
        # In the order that the system prefers, and with the interface of a link-local address.
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)] if usable else []
    except (port_filter.StillOpenError, OSError):  # named when the worker cannot listen
        return host
    return next((each for each in found if ipaddress.ip_address(each.partition("%")[0]) in usable), host)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which transport the workers of a run use.

    Attributes:
      transport: `tensorflow` or `gloo`.
      reason: The reason, with `auto`.
    """

    transport: str
    reason: str = ""


def choose(wishes: Sequence[tuple[str, str, str]]) -> Choice:
    """The transport of all workers.

    Args:
      wishes: By rank, the value of --transport; with `auto`, the reason why the worker cannot use Gloo, or ""; and what
        its replicas are on.

    Raises:
      ConfigError: Different values, or different devices.
    """
    first, _, device = wishes[0]
    for rank, (transport, _, other) in enumerate(wishes):
        if transport != first:
            raise ConfigError(
                f"--transport: worker 0 has {first}, worker {rank} has {transport}. Give all workers the same."
            )
        if other != device:
            raise ConfigError(
                f"--transport: worker 0 trains on {device}, worker {rank} on {other}. Give all workers the same, or "
                "hide GPUs with CUDA_VISIBLE_DEVICES=-1."
            )
    if first != "auto":
        return Choice(first)
    for rank, (_, reason, _) in enumerate(wishes):
        if reason:
            return Choice("tensorflow", f"worker {rank}: {reason}")
    return Choice("gloo", "all workers have it")


def start(
    info: ClusterInfo,
    transport: str,
    in_the_way: str,
    *,
    peer_timeout: float,
    start_timeout: float,
    for_gpus: bool = False,
) -> Choice:
    """Agrees with the other workers on a transport, and connects it. Groups that are made from then on use it.

    Every worker must call this.

    Args:
      info: The cluster, whose multi-worker strategy runs.
      transport: `tensorflow`, `gloo` or `auto`, which takes Gloo if all workers can, else TensorFlow's.
      in_the_way: With `auto`: why this worker cannot use Gloo (`obstacle`); empty if it can.
      peer_timeout: Seconds within which a worker that does not answer is reported as lost.
      start_timeout: Seconds to wait for the others.
      for_gpus: Whether it carries the data of GPUs as well.

    Returns:
      The transport that the workers use.

    Raises:
      ConfigError: With `gloo`: the address of a worker is not one of its machine. Workers have different values.
      PeerLostError: With `gloo`: no connection, with the name of the worker. With each: a worker does not answer.
    """
    own_failure.watch(info, peer_timeout, None)
    deadline = time.monotonic() + start_timeout
    device = _GPUS[has_nccl()] if for_gpus else "CPUs"
    wish = json.dumps([transport, in_the_way, device, uses_library()])
    context.context().set_config_key_value(f"{_PREFIX}/of/{info.worker_rank}", wish)
    told = [json.loads(text) for text in _ask_all(info, f"{_PREFIX}/of", deadline)]
    choice = choose([(wish, why, devices) for wish, why, devices, _ in told])
    if choice.transport == "tensorflow":
        return choice
    library = transport_library()
    mesh, error, all_listen = _bring_up(library, info, deadline, silence=_SILENCE_SHARE * peer_timeout)
    if error:
        library.close(mesh)
        if transport == "auto":
            if info.is_chief:
                _log.warning(
                    "--transport=auto: the workers could not be connected (%s), so data travels over TensorFlow's "
                    "runtime, which is slower. Admit the machines of the cluster to each other on all ports, or give "
                    "--transport=tensorflow.",
                    error,
                )
            return Choice("tensorflow", error)
        if not all_listen:
            raise ConfigError(
                f"--transport=gloo: {error}. Name an address of that worker's machine in {info.source}, or use "
                "--transport=tensorflow."
            )
        raise PeerLostError(f"--transport=gloo: the workers could not be connected: {error}.")
    _end_calls_on_failures(library, mesh, info, peer_timeout)
    use_transport(_maker(mesh, pipelines=all(native for *_, native in told)), for_gpus=for_gpus)
    return choice


def _end_calls_on_failures(library: TransportLibrary, mesh: int, info: ClusterInfo, peer_timeout: float) -> None:
    """Ends the calls that wait for a worker that does not answer, has failed, or leaves."""
    atexit.register(library.close, mesh)
    own_failure.watch(info, peer_timeout, lambda reason: library.abort(mesh, reason, own=True))
    _Watch(library, mesh, info, peer_timeout).start()


def _maker(mesh: int, *, pipelines: bool) -> MakeGroup:
    """The function that creates groups over a mesh.

    Args:
      mesh: Number of the mesh.
      pipelines: Whether the workers of CPUs encode in the transport's own operation: where a worker is to encode with
        plain TensorFlow operations (`TFPAR_OPS=reference`), none does, because all must make the same calls.
    """

    def make(
        members: tuple[int, ...], rank: int, workers: tuple[int, ...], *, all_workers: bool, on_gpus: bool
    ) -> GlooGroup:
        kind = PipelinedGlooGroup if pipelines and not on_gpus else GlooGroup
        return kind(members, rank, mesh, workers, all_workers, on_gpus)

    return make


def _bring_up(library: TransportLibrary, info: ClusterInfo, deadline: float, silence: float) -> tuple[int, str, bool]:
    """Connects all workers.

    Returns:
      The number of the mesh; the first error of any worker, or an empty text; and whether all workers listen.
    """
    rank, store = info.worker_rank, context.context()
    if rank == 0:
        store.set_config_key_value(f"{_PREFIX}/token", secrets.token_hex(_TOKEN_BYTES))
    token = _ask(info, 0, f"{_PREFIX}/token", deadline)
    host = listening_host(info)
    mesh, result = 0, ""
    try:
        mesh = library.listen(rank, _names(info), host, token, _CONNECT_S, silence)
    except MeshError as error:  # published below: the others would wait for the address
        result = f"worker {rank} cannot listen on its own address: {error}"
    store.set_config_key_value(f"{_PREFIX}/address/{rank}", library.address(mesh) or _NOWHERE)
    addresses = _ask_all(info, f"{_PREFIX}/address", deadline)
    try:
        if _NOWHERE not in addresses:
            library.connect(mesh, addresses)
    except MeshError as error:
        result = f"worker {rank} and {error}"
    if dropped := library.dropped(mesh):
        _log.warning(
            "%d connections to this worker without the run's token were dropped: see docs/security.md", dropped
        )
    store.set_config_key_value(f"{_PREFIX}/result/{rank}", result or "connected")
    results = _ask_all(info, f"{_PREFIX}/result", deadline)
    first = next((result for result in results if result != "connected"), "")
    return mesh, first, _NOWHERE not in addresses


def _names(info: ClusterInfo) -> list[str]:
    """TensorFlow's names of the workers, which `failure.find_lost` looks for in errors."""
    return [
        f"/job:{job}/replica:0/task:{index} ({address})"
        for (job, index), address in zip(info.worker_tasks, info.worker_addresses, strict=True)
    ]


def _ask_all(info: ClusterInfo, prefix: str, deadline: float) -> list[str]:
    return [_ask(info, rank, f"{prefix}/{rank}", deadline) for rank in range(info.num_workers)]


def _ask(info: ClusterInfo, rank: int, key: str, deadline: float) -> str:
    """The value that another worker has set, or sets in time.

    Raises:
      PeerLostError: It does not, or has ended.
    """
    ask, misses = context.context().get_config_key_value, 0
    # TensorFlow 2.19 takes no time limit and has a fixed one. The call holds Python's lock, so each call is short.
    limit = (round(1e3 * _ASK_S),) if "timeout_in_ms" in inspect.signature(ask).parameters else ()
    while True:
        try:
            return str(ask(key, *limit))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError) as error:
            # TensorFlow's server runs in every worker by now. The coordination service itself does not end this wait.
            misses = 0 if heartbeat.probe_servers([info.worker_addresses[rank]], _PROBE_S)[0] else misses + 1
            if misses == _MISSES:
                raise PeerLostError(
                    f"{_silent_text([_names(info)[rank]])} during the choice of --transport."
                ) from error
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"worker {rank} did not take part in the choice of --transport in time (--start_timeout). See its "
                    "log."
                ) from error
            time.sleep(0.05)


class _Watch(threading.Thread):
    """Ends the calls of this worker if another worker does not answer. A broken connection ends them without this.

    Args:
      library: The library of the transport.
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
        self._quiet = _QUIET_SHARE * peer_timeout
        left = peer_timeout - self._quiet - _REPORT_S
        self._ask = max(_LEAST_ASK_S, min(_ASK_SHARE * peer_timeout, left / _MISSES))
        # Random, so that many workers do not probe at the same time.
        self._pause = _POLL_S * (1 + 0.1 * secrets.randbelow(10))

    def run(self) -> None:
        """Probes until a worker is lost."""
        misses = [0] * len(self._others)
        while True:
            if self._library.waiting_seconds(self._mesh) < self._quiet:
                misses = [0] * len(self._others)
                time.sleep(self._pause)
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

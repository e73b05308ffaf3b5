"""The other workers: noticing that one is lost, and saying which.

TensorFlow 2.21 notices by itself. Its coordination service takes heartbeats in threads of its own, so that a worker
which compiles, evaluates or writes a checkpoint is not taken for dead, and a connection that breaks ends the
collectives that wait for it. What is left to do: how long it waits, and an error of one line in place of fifty.

Of parameter servers, and of workers beside them, it notices only what breaks a connection. There the chief asks all of
them whether they answer, see `tfpar.cluster.heartbeat`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence

from tfpar.cluster import heartbeat as health
from tfpar.cluster.info import ClusterInfo
from tfpar.cluster.rendezvous import meet, names
from tfpar.process.exit_codes import PeerLostError, end_of_loss, sigterm_is_free
from tfpar.process.safe_write import shortened

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

# A worker counts as unhealthy when its heartbeats stay out for the bound less this: the service looks once a second,
# the word has to get round, and a survivor lingers before it speaks. Never for less than a share, nor for more.
_TO_SAY_S = 5.0
_HEARTBEAT_SHARES = 0.5, 0.8
_POLL_S = 0.2
# For a process that is about to end: its peers learn of the broken call before its port closes.
_ENDING_S = 6.0
_PROBE_MS = 2000
# How long a worker stays reachable after it has seen a peer lost, so that the others do not take it for lost too.
_LINGER_S = 3.0

_GRPC_OPTIONS = "TF_GRPC_DEFAULT_OPTIONS"
_OWN_CONNECTIONS = "grpc.use_local_subchannel_pool"

_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")
_UNHEALTHY = re.compile(r"stopped sending heartbeats\):((?:\s*/job:\S+)+)")

# What TensorFlow raises where another worker, and nothing of this one, is at fault.
COMMUNICATION_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
# What it may also raise then, and otherwise.
_AMBIGUOUS_ERRORS = (tf.errors.FailedPreconditionError, tf.errors.InternalError)


def configure(info: ClusterInfo, *, peer_timeout: float, start_timeout: float) -> None:
    """Sets how long TensorFlow waits for other workers. Call before the strategy is made.

    Args:
      info: The cluster.
      peer_timeout: Seconds after which a worker that does not answer has been named lost by all others.
      start_timeout: Seconds that workers wait for each other at the start.

    Raises:
      RuntimeError: TensorFlow has run an operation already; in its words, but before anybody waits for this worker.
    """
    state = context.context()
    if state._context_handle is not None and state._collective_leader is None:
        raise RuntimeError("Collective ops must be configured at program startup")
    report_losses(info)
    _separate_connections()
    jobs = {job: len(tasks) for job, tasks in info.cluster.items() if job in ("chief", "worker")}
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=_device(info, 0),
        heartbeat_timeout_in_ms=round(1e3 * _heartbeat_timeout(peer_timeout)),
        cluster_register_timeout_in_ms=round(1e3 * start_timeout),
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name=job, num_tasks=n) for job, n in jobs.items()],
    )


def _separate_connections() -> None:
    """Gives heartbeats a connection of their own.

    On that of the gradients they would wait until all that was queued before them is sent, for longer than they may
    where a link is slow: workers that are well would be taken for lost. TensorFlow 2.21 makes one channel for either,
    but gRPC carries channels to one address over one connection unless it is told not to (read by `grpc_channel.cc`
    when the first is made).
    """
    options = os.environ.get(_GRPC_OPTIONS, "")
    if _OWN_CONNECTIONS not in options:
        os.environ[_GRPC_OPTIONS] = f"{options},{_OWN_CONNECTIONS}=1".lstrip(",")


def _heartbeat_timeout(peer_timeout: float) -> float:
    """Seconds without a heartbeat after which a worker is lost, so that `peer_timeout` holds when it is said."""
    least, most = (share * peer_timeout for share in _HEARTBEAT_SHARES)
    return min(most, max(least, peer_timeout - _TO_SAY_S))


def watch_servers(info: ClusterInfo, *, peer_timeout: float, start_timeout: float) -> None:
    """Ends the chief of `parameter_server`, with one line and exit code 75, once a server or worker does not answer.

    TensorFlow gives what a lost worker had to do to the others only where nothing of it was being fetched, and waits
    for one that hangs, as for a parameter server, for ever. Here the loss of any ends the run, as it does elsewhere.

    Args:
      info: The cluster.
      peer_timeout: Seconds after which one that does not answer is lost.
      start_timeout: The same for one that has not answered yet.
    """
    places = {info.server_name(place): place for place in range(1, len(info.server_tasks))}

    def lost(silent: list[str]) -> None:
        end_of_loss(_server_text(names(info, [places[name] for name in silent])))

    servers = {name: info.server_addresses[place] for name, place in places.items()}
    health.watch(servers, peer_timeout=peer_timeout, start_timeout=start_timeout, lost=lost)


@contextlib.contextmanager
def arriving(info: ClusterInfo, timeout: float) -> Iterator[None]:
    """Surrounds the making of the strategy, once all workers have met.

    Args:
      info: The cluster.
      timeout: Seconds to wait for them.

    Raises:
      PeerLostError: Not all came, or one was lost meanwhile.
    """
    meet(info, timeout)
    try:
        yield
    except tf.errors.OpError as error:
        raise PeerLostError(f"TensorFlow could not connect the workers: {error.message.splitlines()[0]}") from error
    finally:
        restore_sigterm()


def restore_sigterm() -> None:
    """Lets SIGTERM do again what Python was told.

    TensorFlow 2.21's coordination service catches it, beside Python, and does nothing but remember it.
    """
    known = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and known is not None:
        signal.signal(signal.SIGTERM, known)


@contextlib.contextmanager
def named(info: ClusterInfo | None) -> Iterator[None]:
    """Turns TensorFlow's errors of a lost worker into a `PeerLostError` that names it.

    Args:
      info: The cluster; None or one worker: nothing is lost.

    Raises:
      PeerLostError: A collective failed because of another worker.
    """
    try:
        yield
    except (*COMMUNICATION_ERRORS, *_AMBIGUOUS_ERRORS) as error:
        if info is None or info.num_workers < 2 or not _is_of_peers(error):
            raise
        if info.num_ps:  # no collectives there: the error itself speaks of the task
            who = names(info, _spoken_of(info, error)) or shortened(error.message.splitlines()[0])
            raise PeerLostError(_server_text(who)) from error
        raise _found(error, info) from error


def _found(error: tf.errors.OpError, info: ClusterInfo) -> PeerLostError:
    """Finds out who is lost. A launcher that ends all workers meanwhile must not keep this one from saying so."""
    in_main = threading.current_thread() is threading.main_thread()
    free = sigterm_is_free()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if in_main else None
    ranks = find_lost(error, info)
    time.sleep(_LINGER_S)
    lost = PeerLostError(_lost_text(info, ranks, error))
    if in_main:

        def say_and_end(*_: object) -> None:
            end_of_loss(lost)

        signal.signal(signal.SIGTERM, say_and_end if free or before is None else before)
    return lost


def report_losses(info: ClusterInfo) -> None:
    """Makes the loss of a worker one line and exit code 75 in any script: Keras' `fit`, a loop of one's own."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        try:
            with named(info):
                raise error
        except PeerLostError as lost:
            end_of_loss(lost)
        except BaseException:
            before(kind, error, trace)

    sys.excepthook = hook


def _is_of_peers(error: tf.errors.OpError) -> bool:
    sure = isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError))
    return sure or any(word in error.message for word in ("/task:", "Collective", "Coordination"))


def _lost_text(info: ClusterInfo, ranks: Sequence[int], error: tf.errors.OpError) -> str:
    if not ranks:
        line = next((line for line in reversed(error.message.splitlines()) if "abort" in line.lower()), error.message)
        return (
            f"a collective operation failed though every worker answers ({shortened(line.strip())}). This worker ends; "
            "the log of the worker that ended first tells why."
        )
    return (
        f"lost {names(info, ranks)}: ended, hanging or not reachable. This worker ends too. The log of the lost worker "
        "tells why it ended; where nothing has to be mended, start all again and they go on from the newest checkpoint."
    )


def _spoken_of(info: ClusterInfo, error: tf.errors.OpError) -> list[int]:
    known = {task: place for place, task in enumerate(info.server_tasks) if place}
    tasks = [(job, int(index)) for job, index in _TASK.findall(error.message)]
    # A worker that has lost a server is spoken of too, as the one who said so.
    tasks = [task for task in tasks if task[0] == "ps"] or tasks
    return [known[task] for task in dict.fromkeys(tasks) if task in known]


def _server_text(who: str) -> str:
    return (
        f"lost {who}: ended, hanging or not reachable. The chief ends; start all tasks of the cluster again and they "
        "go on from the newest checkpoint."
    )


def find_lost(error: tf.errors.OpError, info: ClusterInfo) -> list[int]:
    """The workers that a failed collective speaks of, or else those that do not answer any more.

    Args:
      error: What TensorFlow raised.
      info: The cluster.

    Returns:
      Ranks, without this worker's own; empty if every worker answers.
    """
    listed = _UNHEALTHY.search(error.message)
    if listed:
        return _ranks(info, listed[1])
    # The call that broke names its target first, those it broke in turn after it.
    suspects = list(dict.fromkeys([*_ranks(info, error.message), *range(info.num_workers)]))
    suspects = [rank for rank in suspects if rank != info.worker_rank]
    if "CoordinationService" in error.message and not info.is_chief:
        return _with_the_chief(info, suspects)  # who keeps the service
    deadline = time.monotonic() + _ENDING_S
    while True:
        for rank in suspects:
            if not _answers(info, rank):
                return _with_the_chief(info, suspects) if rank == 0 else [rank]
        if time.monotonic() > deadline:
            return []
        time.sleep(_POLL_S)


def _with_the_chief(info: ClusterInfo, suspects: Sequence[int]) -> list[int]:
    """The chief and all who are silent: to one who learns of a loss late, the chief may have ended because of it."""
    return [0, *(rank for rank in suspects if rank and not _answers(info, rank))]


def _ranks(info: ClusterInfo, text: str) -> list[int]:
    known = {(job, index): rank for rank, (job, index) in enumerate(info.worker_tasks)}
    found = [known.get((job, int(index))) for job, index in _TASK.findall(text)]
    return [rank for rank in dict.fromkeys(found) if rank is not None and rank != info.worker_rank]


def _answers(info: ClusterInfo, rank: int) -> bool:
    try:
        context.context().check_collective_ops_peer_health(_device(info, rank), _PROBE_MS)
    except tf.errors.OpError:
        return False
    return True


def _device(info: ClusterInfo, rank: int) -> str:
    """What TensorFlow calls a worker."""
    job, index = info.worker_tasks[rank]
    return f"/job:{job}/replica:0/task:{index}"

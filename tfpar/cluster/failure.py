"""Detects that another worker is lost, and names it.

TensorFlow 2.21 itself detects losses between synchronous workers. Its coordination service handles heartbeats in
separate threads, so that a worker which compiles, evaluates or writes a checkpoint is not considered dead, and a broken
connection ends the collectives that wait for it. This module sets how long TensorFlow waits, and replaces its error of
fifty lines with one line.

With parameter servers TensorFlow notices only what breaks a connection. There the chief probes all other processes, see
`tfpar.cluster.heartbeat`.
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

from tfpar.cluster import heartbeat, own_failure
from tfpar.cluster.info import ClusterInfo
from tfpar.cluster.rendezvous import BIND_ERROR, format_tasks, port_error, wait_for_all
from tfpar.process.exit_codes import PeerLostError, exit_peer_lost, join_cluster, sigterm_is_ours
from tfpar.process.safe_write import shortened
from tfpar_ops.library import library

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

# A worker counts as unhealthy when it has sent no heartbeat for the timeout less this margin: the service checks once a
# second, the failure notice must propagate, and survivors wait before reporting. Clamped to 50-80 % of the timeout.
_REPORTING_MARGIN_S = 5.0
_HEARTBEAT_SHARES = 0.5, 0.8
_POLL_S = 0.2
# Time for a process that is ending to close its port: its peers see the broken call first.
_ENDING_S = 6.0
_PROBE_MS = 2000
# How long a worker stays reachable after it has noticed a loss, so that the others do not consider it lost too.
_LINGER_S = 3.0

_GRPC_OPTIONS = "TF_GRPC_DEFAULT_OPTIONS"
_OWN_CONNECTIONS = "grpc.use_local_subchannel_pool"

_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")
_UNHEALTHY = re.compile(r"stopped sending heartbeats\):((?:\s*/job:\S+)+)")
# What the native transport says of workers that do not answer (tfpar/collectives/gloo_mesh.py), or whose connection is
# dropped without a word.
_SILENT = re.compile(r"lost (/job:.*): (?:no answer|.*(?:timed out|No route to host))")
# What a worker says of itself (tfpar/cluster/own_failure.py, tfpar_ops/transport/mesh.cc).
_FAILED = re.compile(r"(/job:\S+ \(\S+\)) failed: (.*?)(?: \[Op:.*)?$", re.MULTILINE)

# What TensorFlow raises when another worker is at fault, and not this one.
COMMUNICATION_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
# What it raises then, but also for other reasons.
_AMBIGUOUS_ERRORS = (tf.errors.FailedPreconditionError, tf.errors.InternalError)
# What it also raises with the text of a broken connection alone. Remote storage that fails does, too.
_BROKEN_CONNECTIONS = (tf.errors.UnavailableError, tf.errors.AbortedError)


def configure(info: ClusterInfo, *, peer_timeout: float, start_timeout: float) -> None:
    """Sets how long TensorFlow waits for other workers. Call before the strategy is made.

    Args:
      info: The cluster.
      peer_timeout: Seconds within which all others have reported a worker that does not answer as lost.
      start_timeout: Seconds that workers wait for each other at the start.

    Raises:
      RuntimeError: TensorFlow has already run an operation. The text is TensorFlow's, but no other worker waits yet.
    """
    state = context.context()
    if state._context_handle is not None and state._collective_leader is None:
        raise RuntimeError("Collective ops must be configured at program startup")
    install_peer_loss_hook(info)
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
    """Gives heartbeats a separate connection.

    On the connection of the gradients they would wait until everything queued before them is sent. On a slow link that
    takes longer than the timeout, and healthy workers would be considered lost. TensorFlow 2.21 makes a channel for
    each, but by default gRPC carries all channels to one address over one connection (`grpc_channel.cc` reads the
    option when the first channel is made).
    """
    options = os.environ.get(_GRPC_OPTIONS, "")
    if _OWN_CONNECTIONS not in options:
        os.environ[_GRPC_OPTIONS] = f"{options},{_OWN_CONNECTIONS}=1".lstrip(",")


def _heartbeat_timeout(peer_timeout: float) -> float:
    """Seconds without a heartbeat after which a worker is lost, so that it is reported within `peer_timeout`."""
    least, most = (share * peer_timeout for share in _HEARTBEAT_SHARES)
    return min(most, max(least, peer_timeout - _REPORTING_MARGIN_S))


def watch_servers(info: ClusterInfo, *, peer_timeout: float, start_timeout: float) -> None:
    """Ends the chief of `parameter_server`, with one line and exit code 75, once a server or worker does not answer.

    TensorFlow hands the work of a lost worker to the others only if none of its results were being fetched, and waits
    forever for a worker or parameter server that hangs. Here any loss ends the run, as it does for other strategies.

    Args:
      info: The cluster.
      peer_timeout: Seconds after which a process that does not answer is lost.
      start_timeout: The same for a process that has not answered yet.
    """
    servers = {format_tasks(info, [place]): info.server_addresses[place] for place in range(1, len(info.server_tasks))}
    heartbeat.start_heartbeat(
        servers,
        peer_timeout=peer_timeout,
        start_timeout=start_timeout,
        text=_server_text("{}"),
        core=library().core,
    )


@contextlib.contextmanager
def connecting(info: ClusterInfo, timeout: float) -> Iterator[None]:
    """Waits for all workers; within the context the strategy connects to them.

    Args:
      info: The cluster.
      timeout: Seconds to wait for them.

    Raises:
      PeerLostError: A worker did not join, or was lost meanwhile.
      TrainingError: This process cannot listen on its port.
    """
    wait_for_all(info, timeout)
    if len(info.server_tasks) > 1:
        join_cluster(is_chief=info.is_chief)
    try:
        yield
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0]
        if BIND_ERROR in error.message:
            raise port_error(info, reason) from error
        raise PeerLostError(f"TensorFlow could not connect the workers: {reason}") from error
    finally:
        restore_sigterm()


def restore_sigterm() -> None:
    """Restores the SIGTERM handler that was set through Python.

    TensorFlow 2.21's coordination service installs its own, which only records that the signal came.
    """
    known = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and known is not None:
        signal.signal(signal.SIGTERM, known)


@contextlib.contextmanager
def peer_errors_named(info: ClusterInfo | None) -> Iterator[None]:
    """Turns TensorFlow's errors about a lost worker into a `PeerLostError` that names it. Others pass unchanged, and
    end the calls of the workers that wait for this one (`tfpar.cluster.own_failure`).

    Args:
      info: The cluster; with None or one worker, errors pass unchanged.

    Raises:
      PeerLostError: A collective failed because of another worker, or a connection broke and a worker does not answer.
    """
    with own_failure.told(info), _losses_named(info):
        yield


@contextlib.contextmanager
def _losses_named(info: ClusterInfo | None) -> Iterator[None]:
    try:
        yield
    except (*COMMUNICATION_ERRORS, *_AMBIGUOUS_ERRORS) as error:
        if info is None or info.num_workers < 2 or own_failure.OWN_CALL in error.message:
            raise
        certain = _is_of_peers(error, info)
        if not certain and not isinstance(error, _BROKEN_CONNECTIONS) and "/task:" not in error.message:
            raise
        find = _find_lost_server if info.num_ps else _find_lost_peer
        lost = find(error, info, certain=certain)
        if lost is None:
            raise
        raise lost from error


def _find_lost_server(error: tf.errors.OpError, info: ClusterInfo, *, certain: bool) -> PeerLostError | None:
    """What to say about a lost task of asynchronous training, whose errors name it; None if none is lost."""
    lost = _tasks_in_message(info, error)
    if not certain:
        answers = heartbeat.probe_servers(info.server_addresses[1:], _PROBE_MS / 1e3)
        lost = [place for place, answered in enumerate(answers, start=1) if not answered]
        if not lost:
            return None
    return PeerLostError(_server_text(format_tasks(info, lost) or shortened(error.message.splitlines()[0])))


def _find_lost_peer(error: tf.errors.OpError, info: ClusterInfo, *, certain: bool) -> PeerLostError | None:
    """Finds out which worker is lost. A SIGTERM from the launcher must not prevent this worker from reporting it.

    Args:
      error: What TensorFlow raised.
      info: The cluster.
      certain: Whether another worker is the cause even if all answer.

    Returns:
      What to say; None if no worker is the cause.
    """
    in_main = threading.current_thread() is threading.main_thread()
    ours = sigterm_is_ours()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if in_main else None
    ranks = find_lost(error, info)
    if not ranks and not certain:
        if in_main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        return None
    time.sleep(_LINGER_S)
    lost = PeerLostError(_lost_text(info, ranks, error))
    if in_main:

        def report_and_exit(*_: object) -> None:
            exit_peer_lost(lost)

        signal.signal(signal.SIGTERM, report_and_exit if ours or before is None else before)
    return lost


def install_peer_loss_hook(info: ClusterInfo) -> None:
    """Makes the loss of a worker one line and exit code 75 in any script, such as one that calls Keras' `fit`."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        try:
            with _losses_named(info):
                raise error
        except PeerLostError as lost:
            exit_peer_lost(lost)
        except BaseException:
            own_failure.end(error)
            before(kind, error, trace)

    sys.excepthook = hook


def _is_of_peers(error: tf.errors.OpError, info: ClusterInfo) -> bool:
    """Whether the text is of a collective, or names another task: those of operations name this worker's devices."""
    named = _tasks_in_message(info, error) if info.num_ps else _ranks(info, error.message)
    return bool(named) or any(word in error.message for word in ("Collective", "Coordination"))


def _lost_text(info: ClusterInfo, ranks: Sequence[int], error: tf.errors.OpError) -> str:
    if not ranks:
        line = next((line for line in reversed(error.message.splitlines()) if "abort" in line.lower()), error.message)
        return (
            f"a collective operation failed though every worker answers ({shortened(line.strip())}). This worker "
            "ends; the log of the worker that ended first shows the cause."
        )
    failed = _FAILED.search(error.message)
    what = f"it failed ({failed[2]})" if failed else "ended, hanging or not reachable"
    return (
        f"lost {format_tasks(info, ranks)}: {what}. This worker ends too. The log of the "
        "lost worker shows why it ended; if nothing needs fixing, restart all workers; they resume from the newest "
        "checkpoint."
    )


def _tasks_in_message(info: ClusterInfo, error: tf.errors.OpError) -> list[int]:
    known = {task: place for place, task in enumerate(info.server_tasks) if place}
    tasks = [(job, int(index)) for job, index in _TASK.findall(error.message)]
    # The message also names the worker that reported the loss of a server.
    tasks = [task for task in tasks if task[0] == "ps"] or tasks
    return [known[task] for task in dict.fromkeys(tasks) if task in known]


def _server_text(who: str) -> str:
    return (
        f"lost {who}: ended, hanging or not reachable. The chief ends; restart all tasks of the cluster; they "
        "resume from the newest checkpoint."
    )


def find_lost(error: tf.errors.OpError, info: ClusterInfo) -> list[int]:
    """The workers that the error of a failed collective names, or else those that no longer answer.

    Args:
      error: What TensorFlow raised.
      info: The cluster.

    Returns:
      Ranks, without this worker's; empty if every worker answers.
    """
    listed = next(filter(None, (each.search(error.message) for each in (_UNHEALTHY, _SILENT, _FAILED))), None)
    if listed:
        return _ranks(info, listed[1])
    # The error names the target of the broken call first, and after it those whose calls broke as a consequence.
    suspects = list(dict.fromkeys([*_ranks(info, error.message), *range(info.num_workers)]))
    suspects = [rank for rank in suspects if rank != info.worker_rank]
    if "CoordinationService" in error.message and not info.is_chief:
        return _chief_and_silent(info, suspects)  # which runs the service
    deadline = time.monotonic() + _ENDING_S
    while True:
        for rank in suspects:
            if not _answers(info, rank):
                return _chief_and_silent(info, suspects) if rank == 0 else [rank]
        if time.monotonic() > deadline:
            return []
        time.sleep(_POLL_S)


def _chief_and_silent(info: ClusterInfo, suspects: Sequence[int]) -> list[int]:
    """The chief and all that do not answer: the chief may have ended because of an earlier loss."""
    return [0, *(rank for rank in suspects if rank and not _answers(info, rank))]


def _ranks(info: ClusterInfo, text: str) -> list[int]:
    known = {(job, index): rank for rank, (job, index) in enumerate(info.worker_tasks)}
    ranks = [known.get((job, int(index))) for job, index in _TASK.findall(text)]
    return [rank for rank in dict.fromkeys(ranks) if rank is not None and rank != info.worker_rank]


def _answers(info: ClusterInfo, rank: int) -> bool:
    try:
        context.context().check_collective_ops_peer_health(_device(info, rank), _PROBE_MS)
    except tf.errors.OpError:
        return False
    return True


def _device(info: ClusterInfo, rank: int) -> str:
    """TensorFlow's name of a worker."""
    job, index = info.worker_tasks[rank]
    return f"/job:{job}/replica:0/task:{index}"

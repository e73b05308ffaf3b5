"""Ends the collective calls of the other workers when this worker fails, because they wait for it.

An error that all workers raise alike is no failure of one: the script may catch it and, for example, call `fit` again.
So a worker that raises an error waits for a part of the peer timeout whether all others raise one, too.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator

from tfpar.cluster import heartbeat
from tfpar.cluster.info import ClusterInfo
from tfpar.process.exit_codes import PeerLostError, Preempted
from tfpar.process.safe_write import escaped, shortened

import tensorflow as tf
from tensorflow.python.eager import context

# What all workers raise alike, or what another worker is the cause of.
_NOT_OWN = (PeerLostError, Preempted, GeneratorExit)
# The native transport's errors of this worker (tfpar_ops/transport/started_call.h), which has told the others already.
OWN_CALL = "this worker's part of a collective call failed"

_KEYS = "tfpar/raised"
_ALIKE_SHARE = 0.2  # of the peer timeout
_ASK_MS = 50  # a call of the key-value store holds Python's lock
_PROBE_S = 2.0


class OwnFailure:
    """Tells the other workers of a run about an error of this one.

    Args:
      info: The cluster.
      peer_timeout: Seconds within which the others have to learn of it.
      disconnect: Ends the calls of the native transport on all workers, with a reason; None if it is not in use.
    """

    def __init__(self, info: ClusterInfo, peer_timeout: float, disconnect: Callable[[str], None] | None) -> None:
        self.info, self._disconnect = info, disconnect
        self._patience = _ALIKE_SHARE * peer_timeout
        self._raised = 0  # errors that all workers have raised alike, and this one
        self._failed = False

    def tell(self, error: BaseException) -> None:
        """Ends the calls of the others, unless they raise an error as well. Ctrl-C ends them without waiting.

        Args:
          error: What this worker raises.
        """
        if self._failed:
            return
        alike = False
        try:
            own_call = isinstance(error, tf.errors.OpError) and OWN_CALL in error.message
            alike = not own_call and not isinstance(error, KeyboardInterrupt) and self._all_raise(error)
        finally:
            if not alike:
                self.end(error)
                self._report(error)

    def end(self, error: BaseException) -> None:
        """Ends the calls over the native transport, at once."""
        self._failed = True
        if self._disconnect:
            self._disconnect(_text(error))

    def _all_raise(self, error: BaseException) -> bool:
        """Whether all workers raise an error as often as this one; waits for those that have not yet."""
        self._raised += 1
        store, keys = context.context(), f"{_KEYS}/{self._raised}"
        # TensorFlow 2.19 takes no time limit and has a fixed one.
        limit = (_ASK_MS,) if "timeout_in_ms" in inspect.signature(store.get_config_key_value).parameters else ()
        deadline = time.monotonic() + self._patience
        try:
            store.set_config_key_value(f"{keys}/{self.info.worker_rank}", _text(error))
            for rank in range(self.info.num_workers):
                while not _has(store, f"{keys}/{rank}", limit):
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(_ASK_MS / 1e3)
        except tf.errors.OpError:  # the chief, which has the store, is lost
            return False
        return True

    def _report(self, error: BaseException) -> None:
        """Ends the calls over TensorFlow's runtime, through its coordination service."""
        if not self.info.is_chief and not heartbeat.probe_servers([self.info.worker_addresses[0]], _PROBE_S)[0]:
            return  # the report would wait for the chief; the others have lost it, too
        job, index = self.info.worker_tasks[self.info.worker_rank]
        name = f"/job:{job}/replica:0/task:{index} ({self.info.address})"
        with contextlib.suppress(tf.errors.OpError):
            context.context().report_error_to_cluster(tf.errors.UNAVAILABLE, f"{name} failed: {_text(error)}")


def _has(store: context.Context, key: str, limit: tuple[int, ...]) -> bool:
    try:
        store.get_config_key_value(key, *limit)
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return False
    return True


def _text(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return escaped(shortened(": ".join(filter(None, (type(error).__name__, first)))))


class _Sessions:
    """Nested calls, such as an evaluation within `fit`: the innermost tells of an error, before anything is closed."""

    def __init__(self) -> None:
        self.own: OwnFailure | None = None
        self.depth = 0
        self.told = False


_sessions = _Sessions()


def watch(info: ClusterInfo, peer_timeout: float, disconnect: Callable[[str], None] | None) -> None:
    """Makes `told` tell the workers of a cluster from now on; the arguments are those of `OwnFailure`."""
    _sessions.own = OwnFailure(info, peer_timeout, disconnect)


@contextlib.contextmanager
def told(info: ClusterInfo | None) -> Iterator[None]:
    """Within the context, an error of this worker ends the calls of the others, if they do not raise one, too.

    Args:
      info: The cluster in which this process trains. Unless it is the one that is watched, nobody waits: a hook of a
        run may train another model on a single device.
    """
    if _sessions.own is None or info != _sessions.own.info:
        yield
        return
    _sessions.depth += 1
    try:
        yield
    except _NOT_OWN:
        raise
    except BaseException as error:
        if not _sessions.told:
            _sessions.told = True
            _sessions.own.tell(error)
        raise
    finally:
        _sessions.depth -= 1
        _sessions.told &= _sessions.depth > 0


def end(error: BaseException) -> None:
    """Ends the calls of the others over the native transport at once, because an error ends this process.

    TensorFlow's own end with the process.

    Args:
      error: The error.
    """
    if _sessions.own:
        _sessions.own.end(error)

"""How a process of tfpar ends before its work is done: the exit codes and exceptions for launchers and schedulers."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import types
from typing import NoReturn

from tfpar.process import safe_write

_log = logging.getLogger(__name__)

# As Python and argparse use it for a wrong command line: retrying gives the same error.
USAGE_ERROR = 2

# EX_DATAERR of sysexits.h: the run's numbers went bad (--max_bad_steps). Resuming would repeat that.
BAD_NUMBERS = 65

# A launcher or scheduler must not retry after these: someone has to change something first.
NOT_RETRYABLE = (USAGE_ERROR, BAD_NUMBERS)

# Environment variable that holds the number of workers the launcher has left out.
LEFT_OUT = "TFPAR_LEFT_OUT"
# Set by the launcher if several workers use a GPU.
SHARED_GPUS = "TFPAR_SHARED_GPUS"

# EX_TEMPFAIL of sysexits.h: another worker was lost. Restart all workers; they resume from the newest checkpoint.
PEER_LOST = 75

# Ctrl-C: 128 + SIGINT, as a shell reports it.
INTERRUPTED = 130

# The run was asked to end (SIGTERM) and did; when restarted, it resumes from its newest checkpoint. HTCondor recommends
# this number for such jobs.
PREEMPTED = 85


class PeerLostError(RuntimeError):
    """Another worker has ended, hangs or cannot be reached; the message names it. Exit code 75 if uncaught."""


class Preempted(SystemExit):
    """All workers end because one was asked to (SIGTERM), after saving a checkpoint if they could. Exit code 85."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


_is_chief: list[bool] = []  # of its cluster; empty without one


def join_cluster(*, is_chief: bool) -> None:
    """Notes that this process is one of several that wait for each other, whatever scheduler has started them.

    Args:
      is_chief: Whether it writes the files of the run and logs to the terminal.
    """
    _is_chief[:] = [is_chief]


def chief_of_cluster() -> bool | None:
    """Whether this process is the chief; None if it has not joined a cluster."""
    return _is_chief[0] if _is_chief else None


def exit_immediately(code: int) -> NoReturn:
    """Ends the process without TensorFlow's shutdown, which may wait for workers that are gone (TensorFlow 2.21)."""
    for stream in (sys.stdout, sys.stderr):
        # No stream; a full disk; closed; a signal that came while it was written to.
        with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)


def exit_peer_lost(text: object) -> NoReturn:
    """Logs one line about the lost worker, and ends the process with exit code 75."""
    _log.error("%s", text)
    exit_immediately(PEER_LOST)


def install_exit_code_hook() -> None:
    """Makes an uncaught error with an `exit_code` end this process with that code instead of 1, in any script.

    A usage error is one line, with its notes and without a traceback, and so is Ctrl-C, which has exit code 130.
    """
    if getattr(sys.excepthook, "by_code", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        interactive = hasattr(sys, "ps1")
        if isinstance(error, KeyboardInterrupt) and not interactive:
            _put("interrupted")
            if _is_chief or "TF_CONFIG" in os.environ:  # TensorFlow's shutdown waits for the other workers
                exit_immediately(INTERRUPTED)
            raise SystemExit(INTERRUPTED)  # from here, it is the exit code (CPython's PyErr_Print)
        code = getattr(error, "exit_code", None)
        if code == USAGE_ERROR and not interactive:
            _put(" ".join([f"error: {error}", *getattr(error, "__notes__", ())]))
        else:
            before(kind, error, trace)
        if code is not None:
            raise SystemExit(code)

    hook.by_code = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _put(line: str) -> None:
    if sys.stderr is not None:
        safe_write.put(sys.stderr, line + "\n")


def install_sigterm_handler() -> None:
    """Makes SIGTERM end this process with exit code 85 while it does not train and so has nothing to save.

    `tfpar.guards.preemption` takes over from it. A program that handles SIGTERM itself keeps its handler.
    """
    if sigterm_is_free():
        signal.signal(signal.SIGTERM, _end)


def restore_default_signals() -> None:
    """Makes SIGTERM and Ctrl-C end this process wherever it is, unless the program handles them itself."""
    if sigterm_is_free():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def sigterm_is_free() -> bool:
    """Whether SIGTERM can be handled in this thread, and has no handler but that of `install_sigterm_handler`."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _end)


def sigterm_is_ours() -> bool:
    """Whether SIGTERM has no handler of the program's: it is free, or noted by tfpar (attribute `of_tfpar`)."""
    return sigterm_is_free() or getattr(signal.getsignal(signal.SIGTERM), "of_tfpar", False)


def _end_forks_as_ever() -> None:
    """Makes SIGTERM end a fork of this process, such as a `multiprocessing.Process`: it is no worker of the run."""
    if sigterm_is_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_forks_as_ever)


def _end(_: int, __: types.FrameType | None) -> None:
    # Written past Python's streams: the signal may have come in the middle of a print.
    os.write(2, b"asked to end (SIGTERM) while not training: there is nothing to save. Start again to go on.\n")
    exit_immediately(PREEMPTED)

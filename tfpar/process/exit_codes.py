"""How a process of tfpar ends when it is not done: exit codes and exceptions that launchers and schedulers go by."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import types
from typing import NoReturn

_log = logging.getLogger(__name__)

# As Python and argparse use it for a wrong command line: another try would only give the same error.
USAGE_ERROR = 2

# EX_DATAERR of sysexits.h: the run's numbers went bad (--max_bad_steps). It would do so again from its checkpoint.
BAD_NUMBERS = 65

# Nothing that only starts again may repeat these; somebody has to change something first.
FINAL = (USAGE_ERROR, BAD_NUMBERS)

# Environment variable in which the launcher says how many of the first workers it goes on without.
LEFT_OUT = "TFPAR_LEFT_OUT"

# EX_TEMPFAIL of sysexits.h: another worker was lost. Start all workers again; they go on from the newest checkpoint.
PEER_LOST = 75

# The run was asked to end (SIGTERM) and did so; started again, it goes on from its newest checkpoint. HTCondor
# recommends this number for jobs that do so.
PREEMPTED = 85


class PeerLostError(RuntimeError):
    """Another worker has ended, hangs or cannot be reached; the message names it. Uncaught: exit code 75."""


class Preempted(SystemExit):
    """All workers end because one was asked to (SIGTERM), after saving a checkpoint if they could. Exit code 85."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


def end_now(code: int) -> NoReturn:
    """Ends the process without TensorFlow's shutdown, which may wait for workers that are gone (TensorFlow 2.21)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, RuntimeError):  # a full disk; a signal that came while it was written to
            stream.flush()
    os._exit(code)


def end_of_loss(text: object) -> NoReturn:
    """Says in one line who is lost, and ends the process with exit code 75."""
    _log.error("%s", text)
    end_now(PEER_LOST)


def exit_by_code() -> None:
    """Makes uncaught errors with an `exit_code` end this process with that code, in any script, and not with 1."""
    if getattr(sys.excepthook, "by_code", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        before(kind, error, trace)
        if hasattr(error, "exit_code"):
            raise SystemExit(error.exit_code)  # from here, it is the exit code (CPython's PyErr_Print)

    hook.by_code = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def end_when_asked() -> None:
    """Makes SIGTERM end this process with exit code 85 while it does not train, for then there is nothing to save.

    `tfpar.guards.preemption` takes over from it. A program that handles SIGTERM itself keeps its handler.
    """
    if sigterm_is_free():
        signal.signal(signal.SIGTERM, _end)


def leave_sigterm() -> None:
    """Undoes `end_when_asked`."""
    if sigterm_is_free():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def sigterm_is_free() -> bool:
    """Whether SIGTERM can be handled here, and nobody but `end_when_asked` does."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _end)


def _end(_: int, __: types.FrameType | None) -> None:
    # Written past Python's streams: the signal may have come in the middle of a print.
    os.write(2, b"asked to end (SIGTERM) while not training: there is nothing to save. Start again to go on.\n")
    end_now(PREEMPTED)

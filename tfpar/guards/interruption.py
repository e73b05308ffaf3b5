"""Ctrl-C during training: the process ends immediately, with a line that says how to resume, and without a
traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from tfpar.process.exit_codes import INTERRUPTED, exit_immediately

_entered: list[ExitOnInterrupt] = []


class ExitOnInterrupt:
    """While it is entered, SIGINT ends this process with exit code 130, for a worker of a cluster.

    Its main thread may wait in a collective operation for a worker that has ended, where Python's handler would never
    run; so a thread waits for the signal. A program that handles SIGINT itself keeps its handler, and in another thread
    than the main one nothing can be handled.

    Args:
      report: Prints what to know; runs in that thread, at most for `_REPORT_S` seconds.
    """

    _REPORT_S = 5.0

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self._leaving = contextlib.ExitStack()

    def __enter__(self) -> ExitOnInterrupt:
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return self
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, lambda *_: None)
        threading.Thread(target=self._wait, args=[reader], name="interrupt", daemon=True).start()
        self._leaving.callback(writer.close)  # ends the thread
        self._leaving.callback(signal.set_wakeup_fd, before)
        self._leaving.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
        _entered.append(self)
        self._leaving.callback(_entered.remove, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    def _wait(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(64):
                if signal.SIGINT in numbers:
                    # Not in this thread: the interrupted thread may hold the lock of the output.
                    reporting = threading.Thread(target=self._report, daemon=True)
                    reporting.start()
                    reporting.join(self._REPORT_S)
                    exit_immediately(INTERRUPTED)


def _leave_in_child() -> None:
    """Gives a fork its Ctrl-C back: it has no thread that waits, and the socket leads to that of its parent."""
    for entered in [*_entered]:
        entered.__exit__()


os.register_at_fork(after_in_child=_leave_in_child)

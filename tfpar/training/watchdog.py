"""Ends a process whose training does not move, though it still answers: a deadlock in Python, an input that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator

from tfpar.endings import PEER_LOST, end_now


class Watchdog:
    """Watches one thread's progress from another.

    Peers cannot tell such a worker from a slow one: its heartbeats go on. Where it ends itself, they learn of it like
    of any lost worker.

    Args:
      timeout: Seconds without `progress` after which the process ends; 0: never.
      name: This process, for the message.
    """

    def __init__(self, timeout: float, name: str) -> None:
        self._timeout = timeout
        self._name = name
        self._paused = 1  # until the first update is done: compiling takes what it takes
        self._what = ""
        self._since = time.monotonic()
        self._done = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._timeout:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def progress(self, what: str) -> None:
        """Notes that something was done; `what` comes next, as in `update 120`."""
        self._what, self._since, self._paused = what, time.monotonic(), 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what may take any time: evaluation, checkpoint, tracing."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self._since = time.monotonic()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._timeout / 4)):
            if self._paused or time.monotonic() - self._since < self._timeout:
                continue
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            print(
                f"error: {self._name} made no progress for {self._timeout:g} s (--stall_timeout), in {self._what}. The "
                "stacks above show where it hangs; a worker that shows only its training call waits for its input or "
                "for one that hangs. It ends now; start all workers again and they go on from the newest checkpoint.",
                file=sys.stderr,
            )
            end_now(PEER_LOST)

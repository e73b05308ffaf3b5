"""Ends a process whose work does not move, though it still answers: a deadlock in Python, an input that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tfpar.config import ExperimentConfig
from tfpar.parallel.topology import Topology
from tfpar.process.exit_codes import PEER_LOST, exit_immediately

_log = logging.getLogger(__name__)

# Factor on the timeout for work without steps to watch: the first step, which compiles, a batch of an evaluation.
PATIENCE = 5

_watching: list[Watchdog] = []  # only the innermost watches: what it is for is a part of what the others are for


class Watchdog:
    """Watches one thread's progress from another.

    Peers cannot distinguish such a worker from a slow one, because its heartbeats continue. When it ends itself, they
    detect it like any lost worker. Within another one, this one watches alone.

    Args:
      timeout: Seconds without `progress` after which the process ends; 0: never.
      name: This process, for the message.
      first: What comes first; it may take `PATIENCE` times as long.
      count: Counts what is done; a change is progress. Called in another thread.
    """

    def __init__(
        self,
        timeout: float,
        name: str,
        *,
        first: str = "the startup and the first step",
        count: Callable[[], int] | None = None,
    ) -> None:
        self._timeout = timeout
        self._name = name
        self._first, self._count = first, count
        self._due = ("", 0.0, 0.0)  # the current work, its start and its time limit: replaced together
        self._done = threading.Event()

    @classmethod
    def of_run(cls, config: ExperimentConfig, topology: Topology, **how: Any) -> Watchdog:
        """The watchdog of this process of a run; `how` as for `Watchdog`."""
        name = f"worker {topology.worker}" if topology.synchronous else "the chief"
        return cls(config.strategy.stall_timeout, name, **how)

    def __enter__(self) -> Watchdog:
        self.progress(self._first, patient=True)
        _watching.append(self)
        if self._timeout:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)
        self._done.set()

    def progress(self, what: str, *, patient: bool = False) -> None:
        """Records progress.

        Args:
          what: What comes next, as in `step 120`.
          patient: It may take `PATIENCE` times as long: evaluation, a checkpoint, a step that is compiled first.
        """
        self._due = (what, time.monotonic(), self._timeout * (PATIENCE if patient else 1))

    def _watch(self) -> None:
        try:
            self._watch_until_done()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _watch_until_done(self) -> None:
        stderr = _stderr()
        interval = min(1.0, self._timeout / 4)
        before: tuple[float, int] = (0.0, 0)
        idle, looked = 0.0, time.monotonic()
        while not self._done.wait(interval):
            # For a call that hangs while holding Python's lock, so that this thread cannot run either: TensorFlow 2.21
            # does so when it sends a new function to a remote worker that does not answer. Python then shows the stacks
            # and ends the process with exit code 1, from a thread that needs no lock. That thread has no other clock
            # than one that goes on while the process is stopped: after a longer stop it may end the process at once.
            faulthandler.dump_traceback_later(PATIENCE * self._timeout, exit=True, file=stderr)
            what, since, limit = self._due
            state = since, self._count() if self._count else 0
            now = time.monotonic()
            # Not the time since the progress: a process that was stopped for a while (SIGSTOP) could not make any.
            idle = idle + min(now - looked, 2 * interval) if state == before and _watching[-1:] == [self] else 0.0
            before, looked = state, now
            if idle < limit:
                continue
            faulthandler.dump_traceback(stderr, all_threads=True)
            times = f"{PATIENCE} times " if limit > self._timeout else ""
            _log.error(
                f"{self._name} made no progress for {limit:g} s ({times}--stall_timeout), in {what}. The stacks above "
                "show where it hangs; a worker that shows only its training call is waiting for its input or for a "
                "worker that hangs. This worker ends now; restart all workers; they resume from the newest "
                "checkpoint."
            )
            exit_immediately(PEER_LOST)


def _stderr() -> int:
    """A descriptor for stacks. Notebooks and pytest put objects in the place of `sys.stderr` that have none."""
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, an object without, a closed file
            return stream.fileno()  # type: ignore[union-attr]
    return os.open(os.devnull, os.O_WRONLY)

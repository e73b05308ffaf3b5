"""Being asked to end: SIGTERM becomes a question that all workers answer together, between two updates.

Outside of training there is nothing to save, and it ends the process at once, with the exit code of a preemption.
"""

from __future__ import annotations

import os
import signal
import threading
import types
from typing import Any

from tfpar.endings import PREEMPTED, end_now


def end_when_asked() -> None:
    """Makes SIGTERM end this process with exit code 85 whenever it does not train; `StopRequest` takes over from it.

    A program that handles SIGTERM itself keeps its handler.
    """
    if _is_free():
        signal.signal(signal.SIGTERM, _end)


def _end(_: int, __: types.FrameType | None) -> None:
    # Written past Python's streams: the signal may have come in the middle of a print.
    os.write(2, b"asked to end (SIGTERM) while not training: there is nothing to save. Start again to go on.\n")
    end_now(PREEMPTED)


def _is_free() -> bool:
    """Whether SIGTERM can be handled here, and only this module does."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _end)


class StopRequest:
    """Notes SIGTERM while it is entered, in place of ending the process; a second one ends it at once.

    A program that handles SIGTERM itself keeps its handler, and in another thread than the main one nothing can be
    handled: `received` then stays False.

    Attributes:
      received: Whether SIGTERM has come.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        if _is_free():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number: int, _: types.FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = True

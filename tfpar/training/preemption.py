"""Being asked to end: SIGTERM becomes a question that all workers answer together, between two updates."""

from __future__ import annotations

import os
import signal
import threading
import types


class StopRequest:
    """Notes SIGTERM while it is entered, in place of ending the process; a second one ends it at once.

    A program that handles SIGTERM itself keeps its handler, and in another thread than the main one nothing can be
    handled: `received` then stays False.

    Attributes:
      received: Whether SIGTERM has come.
    """

    def __init__(self) -> None:
        self.received = False
        self._installed = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False

    def _note(self, number: int, _: types.FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = True

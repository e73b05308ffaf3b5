"""Being asked to end: SIGTERM becomes a question that all workers answer together, between two steps.

Outside of training it ends the process at once (`tfpar.process.exit_codes.install_sigterm_handler`).
"""

from __future__ import annotations

import os
import signal
import types
from typing import Any, ClassVar

from tfpar.process.exit_codes import sigterm_is_free


class PreemptionFlag:
    """Notes SIGTERM while it is entered, in place of ending the process; a second one ends it at once.

    A handler that was installed meanwhile stays, such as that of a worker that says whom it has lost.

    A program that handles SIGTERM itself keeps its handler, and in another thread than the main one nothing can be
    handled: `received` then stays False.

    Attributes:
      received: Whether SIGTERM has come.
    """

    _unanswered: ClassVar[bool] = False  # in this process, by a run that was finished before it could stop

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None

    def __enter__(self) -> PreemptionFlag:
        if sigterm_is_free():
            self.received, PreemptionFlag._unanswered = PreemptionFlag._unanswered, False
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None

    def hand_on(self) -> None:
        """Leaves a request that came too late to stop this run to the next run of the process, if there is one."""
        PreemptionFlag._unanswered |= self.received

    def _note(self, number: int, _: types.FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = True

    _note.of_tfpar = True  # type: ignore[attr-defined]

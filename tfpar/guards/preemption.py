"""Being asked to end: SIGTERM becomes a question that all workers answer together, between two steps.

Outside of training it ends the process at once (`tfpar.process.exit_codes.install_sigterm_handler`).
"""

from __future__ import annotations

import os
import signal
import time
import types
from typing import Any, ClassVar

from tfpar.process.exit_codes import sigterm_is_free

# One request may send the signal several times: systemd to every process of a unit (`KillMode=control-group`), srun to
# every process of a step, and their launcher forwards it.
_ONE_REQUEST_S = 3.0


class PreemptionFlag:
    """Notes SIGTERM while it is entered, in place of ending the process; one that comes 3 s later ends it at once.

    A handler that was installed meanwhile stays, such as that of a worker that says whom it has lost.

    A program that handles SIGTERM itself keeps its handler, and in another thread than the main one nothing can be
    handled: `received` then stays False.
    """

    _unanswered: ClassVar[float | None] = None  # when a run of this process was asked that ended before it could stop

    def __init__(self) -> None:
        self._received_at: float | None = None
        self._before: Any = None

    @property
    def received(self) -> bool:
        """Whether SIGTERM has come."""
        return self._received_at is not None

    def __enter__(self) -> PreemptionFlag:
        if sigterm_is_free():
            self._received_at, PreemptionFlag._unanswered = PreemptionFlag._unanswered, None
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None

    def hand_on(self) -> None:
        """Leaves a request that came too late to stop this run to the next run of the process, if there is one."""
        if self.received:
            PreemptionFlag._unanswered = self._received_at

    def _note(self, number: int, _: types.FrameType | None) -> None:
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
        elif now - self._received_at > _ONE_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    _note.of_tfpar = True  # type: ignore[attr-defined]

"""Progress on the terminal: one live line on a TTY, a plain line every few seconds elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from tfpar.process import logs
from tfpar.process.activity import BAR_WIDTH, format_seconds
from tfpar.process.terminal_line import TerminalLine

_log = logging.getLogger(__name__)

_REDRAW_SECONDS = 0.1
_PLAIN_SECONDS = 5.0


class Progress:
    """Shows how far training is. Safe to use from several threads.

    On a TTY the line is overwritten in place, at most every 0.1 s, and cut to the terminal's width; messages of the
    logger `tfpar` appear above it. Elsewhere a line is written at the first step, then about every 5 s, and at the
    end.

    Args:
      total_steps: Steps in the whole run.
      stream: Where to write; by default the live line goes to standard output, and plain lines are log messages.
      live: Whether to overwrite one line; by default, whether the stream is a TTY.
      interval: Seconds between plain lines.
      clock: Returns seconds; for tests.

    Attributes:
      stream: Where it writes.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        interval: float = _PLAIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._logs_lines = stream is None
        self.stream = stream if stream is not None else sys.stdout
        drawn = not self._logs_lines or logs.on_terminal()
        self._live = self.stream.isatty() and drawn if live is None else live
        self._interval = _REDRAW_SECONDS if self._live else interval
        self._clock = clock
        self._lock = threading.RLock()
        self._terminal = TerminalLine(self.stream, live=self._live)
        self._shown_at: float | None = None
        self._start: tuple[int, float] | None = None
        self._values: Mapping[str, str] = {}

    def due(self) -> bool:
        """Whether `update` would show something now; avoids computing values that would not be shown."""
        return self._shown_at is None or self._clock() - self._shown_at >= self._interval

    def update(self, step: int, values: Mapping[str, str]) -> None:
        """Shows a new state, if one is due or training is over.

        Args:
          step: Finished steps.
          values: What else to show, in order of importance, e.g. `{"loss": "0.123", "examples/s": "1200"}`. On a narrow
            terminal the last ones are left out.
        """
        with self._lock:
            if not self.due() and step < self._total:
                return
            now = self._clock()
            if self._start is None:
                self._start = (step, now)  # the time before was mostly compilation
            self._shown_at, self._values = now, values
            line = self._format(step, values, self._eta(step, now))
            if self._live and (not self._logs_lines or _log.isEnabledFor(logging.INFO)):
                logs.attach(self._terminal)
                self._terminal.show(line)
            elif self._logs_lines:
                _log.info("%s", line)
            else:
                self._terminal.message(line)

    def refresh(self, step: int) -> None:
        """Moves the live line on to a step, with the values that it shows: a message may be about this step."""
        with self._lock:
            if self._values and self._live:
                self._terminal.show(self._format(step, self._values, self._eta(step, self._clock())))

    def message(self, text: str) -> None:
        """Writes whole lines above the live line."""
        self._terminal.message(text)

    def close(self) -> None:
        """Leaves the last state of the live line standing and ends it; later messages follow below."""
        logs.detach(self._terminal)
        self._terminal.close()

    def _eta(self, step: int, now: float) -> str | None:
        """Remaining time at the mean pace since the first step, evaluations and checkpoints included."""
        if self._start is None or step <= self._start[0]:
            return None
        seconds_per_step = (now - self._start[1]) / (step - self._start[0])
        return format_seconds(seconds_per_step * (self._total - step))

    def _format(self, step: int, values: Mapping[str, str], eta: str | None) -> str:
        share = min(step / max(self._total, 1), 1.0)
        head = f"step {step:>{len(str(self._total))}}/{self._total}"
        parts = [head, f"{100 * share:3.0f}%", *(f"{name} {value}" for name, value in values.items())]
        if eta:
            parts.insert(3, f"ETA {eta}")  # after the first value, which is the loss
        if not self._live:
            return "  ".join(parts)
        width = max(shutil.get_terminal_size().columns - 1, 1)  # a full last column would wrap
        filled = round(share * BAR_WIDTH)
        barred = [head, "[" + "=" * filled + " " * (BAR_WIDTH - filled) + "]", *parts[1:]]
        if len("  ".join(barred)) <= width:
            return "  ".join(barred)
        while len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        return "  ".join(parts)[:width]

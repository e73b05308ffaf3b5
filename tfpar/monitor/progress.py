"""Progress on the terminal: one live line on a TTY, a plain line every few seconds elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from tfpar.process import logs, safe_write

_log = logging.getLogger(__name__)

_REDRAW_SECONDS = 0.1
_PLAIN_SECONDS = 5.0
_BAR_WIDTH = 20


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
        self._live = self.stream.isatty() if live is None else live
        self._interval = _REDRAW_SECONDS if self._live else interval
        self._clock = clock
        self._lock = threading.RLock()
        self._shown_at: float | None = None
        self._line = ""
        self._painted = 0  # characters of the live line that are on the terminal
        self._start: tuple[int, float] | None = None

    def due(self) -> bool:
        """Whether `update` would show something now; saves working out what nobody sees."""
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
                self._start = (step, now)  # what came before was mostly compilation
            self._shown_at = now
            self._line = self._format(step, values, self._eta(step, now))
            if self._live and (not self._logs_lines or _log.isEnabledFor(logging.INFO)):
                logs.attach(self)
                self._paint()
            elif self._logs_lines:
                _log.info(self._line)
            else:
                self._write(self._line + "\n")

    def message(self, text: str) -> None:
        """Writes whole lines above the live line."""
        with self._lock:
            self._erase()
            self._write(text + "\n")
            self._paint()

    def close(self) -> None:
        """Leaves the last state of the live line standing and ends it; later messages follow below."""
        logs.detach(self)
        with self._lock:
            if self._painted:
                self._write("\n")
            self._painted = 0
            self._line = ""

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
        filled = round(share * _BAR_WIDTH)
        barred = [head, "[" + "=" * filled + " " * (_BAR_WIDTH - filled) + "]", *parts[1:]]
        if len("  ".join(barred)) <= width:
            return "  ".join(barred)
        while len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        return "  ".join(parts)[:width]

    def _paint(self) -> None:
        if self._live and self._line:
            # Blanks instead of an escape sequence: the launcher cuts lines that hold none to what its prefix leaves.
            self._write("\r" + self._line.ljust(self._painted))
            self._painted = len(self._line)

    def _erase(self) -> None:
        if self._painted:
            self._write("\r" + " " * self._painted + "\r")
            self._painted = 0

    def _write(self, text: str) -> None:
        if not safe_write.put(self.stream, text):
            # The reader is gone (`| head`). Training goes on, and what is still in the buffer must not fail at exit.
            safe_write.to_nowhere(self.stream)


def format_seconds(seconds: float) -> str:
    """A duration as `m:ss` or `h:mm:ss`."""
    whole = max(round(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"

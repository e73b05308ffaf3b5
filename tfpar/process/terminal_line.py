"""One line at the bottom of a terminal that is overwritten in place."""

from __future__ import annotations

import threading
from typing import TextIO

from tfpar.process import safe_write


class TerminalLine:
    """A line at the bottom of a terminal, overwritten in place. Safe to use from several threads.

    It has its own text, which another may temporarily cover: for example, the progress of an evaluation covers that of
    training.

    Args:
      stream: Where to write.
      live: Whether to paint the line at all; whole lines are written either way.

    Attributes:
      stream: Where it writes.
    """

    def __init__(self, stream: TextIO, *, live: bool = True) -> None:
        self.stream = stream
        self._live = live
        self._lock = threading.RLock()
        self._text = ""
        self._cover = ""
        self._painted = 0  # characters of the line that are on the terminal

    def show(self, text: str) -> None:
        """Replaces the line's own text."""
        with self._lock:
            self._text = text
            self._paint()

    def cover(self, text: str) -> None:
        """Shows another text in place of the line's own; an empty one uncovers it."""
        with self._lock:
            self._cover = text
            if text or self._text:
                self._paint()
            else:
                self._erase()

    def message(self, text: str) -> None:
        """Writes whole lines above the line."""
        with self._lock:
            self._erase()
            self._write(text + "\n")
            self._paint()

    def close(self) -> None:
        """Leaves the line's own text standing and ends it; later messages follow below."""
        with self._lock:
            if self._cover:
                self.cover("")
            if self._painted:
                self._write("\n")
            self._painted = 0
            self._text = ""

    def _paint(self) -> None:
        text = self._cover or self._text
        if self._live and text:
            # Blanks instead of an escape sequence: the launcher truncates lines without escape sequences to the width
            # after its prefix.
            self._write("\r" + text.ljust(self._painted))
            self._painted = len(text)

    def _erase(self) -> None:
        if self._painted:
            self._write("\r" + " " * self._painted + "\r")
            self._painted = 0

    def _write(self, text: str) -> None:
        if not safe_write.put(self.stream, text):
            # The reader is gone (`| head`). Training goes on, and what is still in the buffer must not fail at exit.
            safe_write.to_nowhere(self.stream)

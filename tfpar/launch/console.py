"""Many processes on one terminal: prefixed whole lines, and one live progress line that survives.

Output arrives in pieces of any size. A `Channel` cuts the pieces of one process into lines; the `Terminal`
that all channels share writes them so that no two lines mix. Text that a process overwrites with a carriage
return is its live line: on a terminal it is repainted below everything else, elsewhere only its last state is
written, when the line ends.
"""

from __future__ import annotations

import re
import shutil
from collections import deque
from typing import BinaryIO

from tfpar.process import safe_write

_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_EXCEPTION = re.compile(r"error: |([A-Za-z_]\w*\.)*[A-Za-z_]\w*(Error|Exception|Interrupt|Exit)\b")
_LONGEST_LINE = 1 << 20  # bytes held back while waiting for a newline

COLOURS = {"chief": b"\x1b[1;32m", "worker": b"\x1b[36m", "ps": b"\x1b[33m", "launch": b"\x1b[1m"}
_RESET = b"\x1b[0m"


class Terminal:
    """Where the lines go.

    Attributes:
      is_tty: Whether live lines are shown as they change.
      broken: Set once the reader is gone (`| head`); what comes after is dropped.
    """

    def __init__(self, stream: BinaryIO, *, is_tty: bool, colours: bool) -> None:
        self.is_tty = is_tty
        self.broken = False
        self._stream = stream
        self._colours = colours
        self._live: tuple[str, bytes] | None = None  # label and text of the line being overwritten
        self._painted = False

    def line(self, label: str, text: bytes) -> None:
        """Writes a whole line, above the live line if there is one."""
        if self._live and self._live[0] == label:
            self._live = None
        self._write(self._clear() + self._prefix(label) + text + b"\n")
        self._paint()

    def live(self, label: str, text: bytes) -> None:
        """Shows or replaces the live line of a process; empty text takes it away.

        Only one process at a time has the live line; another's is not shown until that one's ends.
        """
        if not self.is_tty or (self._live and self._live[0] != label):
            return
        self._live = (label, text) if _ESCAPE.sub(b"", text).strip() else None
        self._paint()

    def _prefix(self, label: str) -> bytes:
        text = f"[{label}]".encode()
        colour = COLOURS.get(label.split()[0], b"") if self._colours else b""
        return (colour + text + _RESET if colour else text) + b" "

    def _clear(self) -> bytes:
        painted, self._painted = self._painted, False
        return b"\r\x1b[K" if painted else b""

    def _paint(self) -> None:
        if self._live is None:
            self._write(self._clear())
            return
        label, text = self._live
        if not _ESCAPE.search(text):  # a wrapped line could not be overwritten; cut where that is safe to do
            room = max(1, shutil.get_terminal_size().columns - len(label) - 4)
            text = text.decode(errors="surrogateescape")[:room].encode(errors="surrogateescape")
        self._clear()
        self._write(b"\r\x1b[K" + self._prefix(label) + text)
        self._painted = True

    def _write(self, data: bytes) -> None:
        if self.broken or not data:
            return
        self.broken = not safe_write.put(self._stream, data)


class Channel:
    """The output of one process.

    Args:
      terminal: Where its lines go.
      label: Its name, which prefixes its lines.
      log: File that its lines are written to as well.
      live: Whether its live line is shown as it changes.

    Attributes:
      recent: Its last lines, without colours, to explain a failure.
    """

    def __init__(self, terminal: Terminal, label: str, log: BinaryIO | None = None, *, live: bool = True) -> None:
        self.recent: deque[str] = deque(maxlen=50)
        self._terminal = terminal
        self._label = label
        self._log = log
        self._live = live
        self._pending = b""

    def feed(self, data: bytes) -> None:
        """Takes what the process wrote, in pieces of any size."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._end_line(_visible(line))
        if len(self._pending) > _LONGEST_LINE:
            self._end_line(self._pending)
            self._pending = b""
        if b"\r" in self._pending:
            text = _visible(self._pending)
            # What was overwritten need not be kept; whether the next piece overwrites this one must be.
            self._pending = b"\r" + text + (b"\r" if self._pending.endswith(b"\r") else b"")
            if self._live:
                self._terminal.live(self._label, text)

    def close(self) -> None:
        """Writes what came after the last newline, and closes the log."""
        if self._pending.strip(b"\r"):
            self._end_line(_visible(self._pending))
        self._pending = b""
        self._terminal.live(self._label, b"")
        if self._log:
            try:
                self._log.close()
            except OSError:  # its disk is full
                safe_write.to_nowhere(self._log)

    def last_error(self) -> str:
        """The last line that looks like a Python exception or an `error:` message; empty if none does."""
        return next((line for line in reversed(self.recent) if _EXCEPTION.match(line)), "")

    def _end_line(self, text: bytes) -> None:
        plain = _ESCAPE.sub(b"", text)
        self.recent.append(plain.decode(errors="replace"))
        if self._log:
            safe_write.put(self._log, plain + b"\n")
        self._terminal.line(self._label, text)


def _visible(line: bytes) -> bytes:
    """What stays of a line after its carriage returns: the last part that is not empty."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"")

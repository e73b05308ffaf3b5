"""Messages of tfpar, through the standard `logging`.

Every module logs to `logging.getLogger(__name__)`, so all messages pass the logger `tfpar`:

```python
logger = logging.getLogger("tfpar")
logger.setLevel(logging.WARNING)                          # only warnings and errors
logger.addHandler(logging.FileHandler("train.log"))       # to a file as well
logger.handlers[:] = [logging.FileHandler("train.log")]   # to a file instead of the terminal
logger.handlers[:] = [logging.NullHandler()]              # nothing at all
logger.propagate = True                                   # to the handlers of the root logger as well
```

`logging.config.dictConfig` with an entry for `tfpar` does the same: it replaces the handlers.

Importing tfpar gives the logger the level INFO, unless it has one, and default handlers, unless it has any. These write
bare messages to standard output, with `note: ` or `WARNING: ` in front where the level says so, and errors to standard
error after `error: `. A live progress line is cleared before a message and drawn again after it. With the default
handlers, records are not propagated to the root logger: `absl.app.run` installs a handler there, which would print
every message a second time.

In experiment scripts absl's `--verbosity` sets the level: 1 DEBUG, 0 INFO, -1 WARNING, -2 ERROR.
"""

from __future__ import annotations

import logging
import sys
from typing import Protocol, TextIO

from tfpar.process import safe_write

import absl.logging

# Between INFO and WARNING: worth knowing, but nothing is wrong.
NOTE = 25

_LOGGER = logging.getLogger("tfpar")
_PREFIXES = ((logging.ERROR, "error: "), (logging.WARNING, "WARNING: "), (NOTE, "note: "))


class LiveLine(Protocol):
    """A line that is being overwritten in place.

    Attributes:
      stream: Where it is drawn.
    """

    stream: TextIO

    def message(self, text: str) -> None:
        """Writes whole lines above it."""

    def cover(self, text: str) -> None:
        """Shows another text in its place; an empty one uncovers it."""


class LevelFormatter(logging.Formatter):
    """The message after a word for its level: `note: `, `WARNING: `, `error: `, nothing for INFO and below."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record, with its traceback if it has one."""
        prefix = next((prefix for level, prefix in _PREFIXES if record.levelno >= level), "")
        return prefix + super().format(record)


class ConsoleHandler(logging.Handler):
    """Writes to this process's standard output, or errors to standard error. Never fails on a full disk.

    Two handlers, so that an error is written even while another thread is stuck in a message on standard output.

    Args:
      errors: Whether to take errors, to standard error, or else what is below them, to standard output.
    """

    def __init__(self, *, errors: bool) -> None:
        super().__init__()
        self._errors = errors
        self.setFormatter(LevelFormatter())
        # Filters run before the handler's lock is taken, which a thread stuck in `emit` would hold.
        self.addFilter(lambda record: (record.levelno >= logging.ERROR) == errors)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        try:
            # Looked up now: the program, or a test, may have redirected it.
            _write(sys.stderr if self._errors else sys.stdout, self.format(record))
        except Exception:
            self.handleError(record)


_live_line: LiveLine | None = None


def attach(line: LiveLine) -> None:
    """From now on, messages to the stream of a live line are written through it."""
    global _live_line
    _live_line = line


def detach(line: LiveLine) -> None:
    """Undoes `attach`; does nothing where another line has been attached since."""
    global _live_line
    if _live_line is line:
        _live_line = None


def live_line() -> LiveLine | None:
    """The line that was attached last."""
    return _live_line


def on_terminal() -> bool:
    """Whether messages are shown on standard output, so that a live line may be drawn there."""
    return _LOGGER.isEnabledFor(logging.INFO) and any(isinstance(each, ConsoleHandler) for each in _LOGGER.handlers)


def install() -> None:
    """Gives the logger `tfpar` a level and the default handlers, where the user has set none."""
    logging.addLevelName(NOTE, "NOTE")
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    if _LOGGER.handlers:
        return
    _LOGGER.propagate = False
    for errors in (False, True):
        _LOGGER.addHandler(ConsoleHandler(errors=errors))


def set_absl_verbosity(verbosity: int) -> None:
    """Sets the level of the logger `tfpar` as absl's flag `--verbosity` counts it.

    Args:
      verbosity: 1 and above DEBUG, 0 INFO, -1 WARNING, -2 ERROR, -3 CRITICAL.
    """
    _LOGGER.setLevel(absl.logging.converter.absl_to_standard(verbosity))


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # a process without standard streams
        return
    line = _live_line
    if line is not None and line.stream is stream:
        line.message(text)
    elif not safe_write.put(stream, text + "\n"):
        safe_write.to_nowhere(stream)  # the reader has gone (`| head`); the training goes on

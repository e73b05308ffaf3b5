"""Shows the current activity of a process while there is no other output: compiling, evaluating, waiting."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tfpar.process import logs
from tfpar.process.exit_codes import chief_of_cluster
from tfpar.process.terminal_line import TerminalLine

# Before the first sign on a TTY, and between two; and the same elsewhere, where every sign stays.
_LIVE_SECONDS = (0.5, 0.2)
_PLAIN_SECONDS = (2.0, 10.0)
BAR_WIDTH = 20
_log = logging.getLogger(__name__)
_running: list[threading.Event] = []  # the innermost activity is the one that is shown


@contextlib.contextmanager
def activity(
    what: str,
    *,
    count: Callable[[], int] | None = None,
    total: int = 0,
    shown: bool | None = None,
    in_logs: bool = True,
) -> Iterator[None]:
    """Shows what a process is doing for as long as the block takes; nothing if that is less than half a second.

    On a TTY the live line says it, with the time since it began, and if it can be counted, with a bar and the time
    left. Elsewhere it is a line after 2 s, and one every 10 s from then on. Within another activity, this one is shown.

    Args:
      what: Such as `"compiling the step"`.
      count: Returns how much of it is done; called in another thread.
      total: How much there is; 0: not known.
      shown: Whether to show anything. By default, whether this process is the first of its cluster, if there is one.
      in_logs: Whether to show it where standard output is no TTY, too.
    """
    live = sys.stdout is not None and sys.stdout.isatty() and logs.on_terminal()
    shown = _is_first_process() if shown is None else shown
    if not shown or not (live or in_logs) or not _log.isEnabledFor(logging.INFO):
        yield
        return
    over = threading.Event()
    _running.append(over)
    thread = threading.Thread(
        target=_show, args=(over, what, count, total, live), name=f"activity: {what}", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        _running.remove(over)
        thread.join()


def _is_first_process() -> bool:
    """Whether this process is the chief, or worker 0 where there is none.

    Until it has joined its cluster, as `TF_CONFIG` says; yes without a readable one.
    """
    is_chief = chief_of_cluster()
    if is_chief is not None:
        return is_chief
    try:
        description = json.loads(os.environ.get("TF_CONFIG") or "{}")
        task = description.get("task") or {}
        place = task.get("type", "worker"), int(task.get("index", 0))
        return place == (("chief" if "chief" in (description.get("cluster") or {}) else "worker"), 0)
    except (ValueError, AttributeError, TypeError):
        return True


def _show(over: threading.Event, what: str, count: Callable[[], int] | None, total: int, live: bool) -> None:
    began = time.monotonic()
    delay, interval = _LIVE_SECONDS if live else _PLAIN_SECONDS
    own: TerminalLine | None = None
    covered: logs.LiveLine | None = None
    while not over.wait(delay):
        delay = interval
        if _running[-1:] != [over]:
            continue
        text = describe(what, time.monotonic() - began, count() if count else 0, total, bar=live)
        if not live:
            _log.info("%s", text)
            continue
        line = logs.live_line()
        if line is None or line.stream is not sys.stdout:
            line = own = TerminalLine(sys.stdout)
            logs.attach(own)
        line.cover(text[: max(shutil.get_terminal_size().columns - 1, 1)])
        covered = line
    if covered is not None:
        covered.cover("")
    if own is not None:
        logs.detach(own)


def describe(what: str, seconds: float, done: int, total: int, *, bar: bool) -> str:
    """An activity in one line.

    Args:
      what: Its name.
      seconds: How long it has taken.
      done: How much of it is done.
      total: How much there is; 0: not known.
      bar: Whether to draw a bar.

    Returns:
      For example `evaluating digits [======              ] 120/360  0:03, 0:06 left`.
    """
    elapsed = format_seconds(seconds)
    if not total:
        return f"{what} ...  {elapsed}"
    share = min(done / total, 1.0)
    filled = round(share * BAR_WIDTH)
    drawn = " [" + "=" * filled + " " * (BAR_WIDTH - filled) + "]" if bar else " ..."
    left = f", {format_seconds(seconds / share - seconds)} left" if share else ""
    return f"{what}{drawn} {done}/{total}  {elapsed}{left}"


def format_seconds(seconds: float) -> str:
    """A duration as `m:ss` or `h:mm:ss`."""
    whole = max(round(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"

"""The memory of this process and of its machine."""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # of the container, as it sees it itself
_SHARE = 0.01  # of the time; the next steps need about twice as long again to take the memory back


def main_memory() -> tuple[int, int] | None:
    """Bytes of main memory that are available, and all bytes, within the limit of the container; None if unknown."""
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # The cache of files is taken back when it is needed, as MemAvailable reckons with.
        cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        free, total = min(free, limit - used + cache), min(total, limit)
    return free, total


def return_freed_memory() -> None:
    """Gives the operating system back what this process has freed; does nothing where the C library cannot.

    glibc keeps freed memory between blocks that are in use. After a model has been built whole in the host's memory,
    and moved in parts, that is most of the model.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class RegularReturns:
    """`return_freed_memory` while a model trains.

    Heaps hold large tensors between small objects that stay, so that a later step finds other gaps, and a process grows
    for as long as it trains. In a worker that trains six blocks of GPT-2, each step left 200 to 400 MiB of them.
    """

    def __init__(self) -> None:
        self._returned_at, self._took = time.monotonic(), 0.0

    def after_steps(self) -> None:
        """Returns what is free, as often as takes a hundredth of the time at most."""
        if self._took <= _SHARE * (time.monotonic() - self._returned_at):
            self.before_copies()

    def before_copies(self) -> None:
        """Returns what is free. Call it before weights are copied, which takes longer."""
        start = time.monotonic()
        return_freed_memory()
        self._returned_at = time.monotonic()
        self._took = self._returned_at - start

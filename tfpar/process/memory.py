"""The memory of this process and of its machine."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def main_memory() -> tuple[int, int] | None:
    """Bytes of main memory that are available, and all bytes, within the limit of the container; None if unknown."""
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
        total = min(total, limit)
    return free, total


def return_freed_memory() -> None:
    """Gives the operating system back what this process has freed; does nothing where the C library cannot.

    glibc keeps freed memory between blocks that are in use. After a model has been built whole in the host's memory,
    and moved in parts, that is most of the model.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)

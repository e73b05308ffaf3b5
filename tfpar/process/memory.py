"""The memory of this process."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Gives the operating system back what this process has freed; does nothing where the C library cannot.

    glibc keeps freed memory between blocks that are in use. After a model has been built whole in the host's memory,
    and moved in parts, that is most of the model.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)

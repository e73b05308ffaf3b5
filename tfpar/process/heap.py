"""The C library's heaps.

glibc gives threads up to eight heaps per core (`M_ARENA_MAX`, malloc(3)), and each heap keeps what its threads have
freed, where the others cannot use it. TensorFlow's threads take and free the same sizes in turn, so a worker's peak
contains most of them several times.
"""

from __future__ import annotations

import ctypes
import os
import platform

from tfpar.process.cores import cores

_ARENA_MAX = -8  # M_ARENA_MAX in glibc's malloc.h


def share_heaps() -> bool:
    """Limits the number of heaps to that of the cores, for threads that start later; returns whether it has.

    Nothing changes with other C libraries, or if the environment sets a number (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`).
    """
    if (
        "MALLOC_ARENA_MAX" in os.environ
        or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
        or platform.libc_ver()[0] != "glibc"
    ):
        return False
    return bool(ctypes.CDLL(None).mallopt(_ARENA_MAX, cores()))

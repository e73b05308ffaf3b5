"""The processor's cores."""

from __future__ import annotations

import os


def cores() -> int:
    """Returns the number of cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

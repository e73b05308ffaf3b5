"""The cores that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib


def cores() -> int:
    """Returns the number of cores of this host that this process may use: those it is pinned to, or as many as its
    control groups allow it to keep busy, as in a container with a CPU limit."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return usable if quota is None else max(1, min(usable, math.ceil(quota)))


def cpu_quota(
    groups: pathlib.Path = pathlib.Path("/proc/self/cgroup"), root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")
) -> float | None:
    """Returns the processor time per second that the control groups of this process allow, or None for no limit.

    Args:
      groups: Names the groups of the process, one per line: `hierarchy:controllers:path`.
      root: Where the groups are mounted.
    """
    quotas: list[float] = []
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                base = root
            elif "cpu" in controllers.split(","):
                base = next((each for name in (controllers, "cpu") if (each := root / name).is_dir()), root)
            else:
                continue
            # Within a container, the path may be that on its host, where only `base` exists.
            group = base / path.lstrip("/")
            for each in (group, *group.parents):
                quotas += [quota] if (quota := _quota_of(each)) is not None else []
                if each == base:
                    break
    return min(quotas, default=None)


def _quota_of(group: pathlib.Path) -> float | None:
    """Returns the limit of one group; None if it has none, or does not exist."""
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = map(float, (group / "cpu.max").read_text().split())
        else:
            quota, period = (float((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0 and period > 0:
            return quota / period
    return None  # also for "max 100000"

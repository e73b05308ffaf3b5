"""The cores that this process may use, and those that the workers of a host share out."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pathlib

# Environment variable with the cores of each worker of this host, where each has its own: JSON lists of numbers.
WORKER_CORES = "TFPAR_WORKER_CORES"


def cores() -> int:
    """Returns the number of cores of this host that this process may use: those it is pinned to, or as many as its
    control groups allow it to keep busy, as in a container with a CPU limit."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return usable if quota is None else max(1, min(usable, math.ceil(quota)))


def cores_of_host() -> int:
    """Returns the number of cores that the workers of this host may use together."""
    return sum(map(len, _worker_cores())) or cores()


def cores_of_others() -> list[list[int]]:
    """Returns the cores of each other worker of this host; none if workers do not have cores of their own."""
    return [each for each in _worker_cores() if not os.sched_getaffinity(0).issuperset(each)]


def listed(shares: list[list[int]]) -> dict[str, str]:
    """Returns the variable that tells workers of the cores that `share_out` gave them."""
    return {WORKER_CORES: json.dumps(shares)}


def _worker_cores() -> list[list[int]]:
    found: list[list[int]] = json.loads(os.environ.get(WORKER_CORES) or "[]")
    return found


def share_out(processes: int) -> list[list[int]]:
    """Shares out the cores of this process; returns the numbers of those of each of several processes.

    Linux often runs a thread where the one ran that wakes it. A worker's threads wake each other all the time, and with
    all cores to choose from, two workers wait for each other on one while another is idle.

    Returns an empty list where processes could not have cores of their own: there are more of them than cores, or a
    control group allows less time than that of all cores.
    """
    usable = sorted(os.sched_getaffinity(0), key=_place) if hasattr(os, "sched_getaffinity") else []
    if not 1 < processes <= len(usable) or cores() < len(usable):
        return []
    bounds = [number * len(usable) // processes for number in range(processes + 1)]
    return [usable[begin:end] for begin, end in itertools.pairwise(bounds)]


def _place(number: int, root: pathlib.Path = pathlib.Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """Returns a key that puts the hardware threads of one core, and the cores of one socket, next to each other.

    Args:
      number: Number of the core, as of `os.sched_getaffinity`.
      root: Where the system describes cores.
    """
    topology, place = root / f"cpu{number}" / "topology", []
    with contextlib.suppress(OSError, ValueError):
        place = [int((topology / name).read_text()) for name in ("physical_package_id", "die_id", "core_id")]
    return (*place, number)


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

"""Bytes that tensors asked TensorFlow's allocator for, beside those that it gave out, from its own trace.

The allocator of GPUs (BFC), which CPUs have with the environment `COUNTING`, gives a tensor at least what it asks for:
a free piece of memory that is not much larger is given whole. What a program needs is the former, what a device must
have is the latter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

# Environment of the processes that are measured (TensorFlow 2.21, `ProcessState::GetCPUAllocator`).
COUNTING = {"TF_CPU_ALLOCATOR_USE_BFC": "1"}


@dataclasses.dataclass
class Peaks:
    """The most bytes at once in a process.

    Attributes:
      asked: What all tensors together asked for.
      given: What the allocator gave out, which may be at another time.
    """

    asked: int = 0
    given: int = 0


@contextlib.contextmanager
def traced() -> Iterator[Peaks]:
    """In this context the allocator is traced; afterwards the peaks are known. Build models inside: what exists before
    counts as if it had asked for what it was given."""
    peaks = Peaks()
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            yield peaks
        finally:
            tf.profiler.experimental.stop()
        [path] = Path(folder).rglob("*.xplane.pb")
        unused: dict[int, int] = {}  # bytes that a tensor has been given and did not ask for, by address
        in_all = 0
        for event in sorted(_events(path), key=lambda event: event["time"]):
            in_all -= unused.pop(event["address"], 0)
            if event["allocates"]:
                unused[event["address"]] = event["allocation_bytes"] - event["requested_bytes"]
                in_all += unused[event["address"]]
                peaks.given = max(peaks.given, event["bytes_allocated"])
                peaks.asked = max(peaks.asked, event["bytes_allocated"] - in_all)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The allocations and deallocations in a profile: when (picoseconds), at which address, and how many bytes."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2  # the profiler has no public reader

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    for plane in space.planes:
        names = {number: each.name for number, each in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if name not in ("MemoryAllocation", "MemoryDeallocation"):
                    continue
                stats = {names[each.metadata_id]: getattr(each, each.WhichOneof("value")) for each in event.stats}
                yield {
                    "time": 1000 * line.timestamp_ns + event.offset_ps,
                    "allocates": name == "MemoryAllocation",
                    "address": stats["addr"],
                    **{each: int(stats[each]) for each in ("allocation_bytes", "requested_bytes", "bytes_allocated")},
                }

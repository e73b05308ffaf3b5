"""The devices and links for which a plan is made, as plain data."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfpar.collectives.cost_model import Link
from tfpar.config import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_RATES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])bit(?:/s)?(?:,\s*(\d+(?:\.\d+)?)\s*(ms|us))?", re.IGNORECASE)


# Measured for TensorFlow's collectives between logical devices of a process, and over 10 Gbit/s between processes.
_WITHIN, _BETWEEN = Link(2e-4, 1e9), Link(1e-3, 1.25e9)


# How a pass, or an update, runs: as one XLA program, as an XLA program for each direction (stages), or op by op.
PROGRAM, STAGES, OPS = "program", "stages", "ops"


class Point(NamedTuple):
    """A measured forward and backward pass.

    Attributes:
      examples: Number of examples.
      seconds: Seconds of the pass, divided by the FLOPs for one example.
      processor: The same of processor time, of all cores together; 0 if it is not known.
    """

    examples: int
    seconds: float
    processor: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device was measured to reach in a training step while the others were idle.

    Attributes:
      passes: Forward and backward passes, by how they run, with ascending numbers of examples. `OPS` is always there.
      updates: Bytes per second of gradients, weights and state that an update reads and writes, by how it runs: once
        each gradient, twice the others. `OPS` is always there.
      adding: Bytes per second that the sum of two tensors reads and writes.
    """

    passes: Mapping[str, Sequence[Point]]
    updates: Mapping[str, float]
    adding: float

    def seconds(self, way: str, flops: float, examples: float) -> float:
        """Returns the seconds of a pass, interpolated between those that were measured.

        Args:
          way: How it runs.
          flops: FLOPs for an example.
          examples: Number of examples.
        """
        return flops * _interpolated([(point.examples, point.seconds) for point in self._points(way)], examples)

    def processor(self, way: str, flops: float, examples: float) -> float:
        """Returns the processor time of a pass, as `seconds` its time."""
        return flops * _interpolated([(point.examples, point.processor) for point in self._points(way)], examples)

    def _points(self, way: str) -> Sequence[Point]:
        return self.passes.get(way) or self.passes[OPS]

    def update(self, way: str) -> float:
        """Returns the bytes per second of an update."""
        return self.updates.get(way) or self.updates[OPS]

    def with_memory_shared(self, share: float) -> Rates:
        """Returns the rates of a device that gets only a share of the bandwidth of its memory."""
        updates = {way: share * rate for way, rate in self.updates.items()}
        return dataclasses.replace(self, updates=updates, adding=share * self.adding)


def _interpolated(points: Sequence[tuple[int, float]], at: float) -> float:
    """Returns the value at a place, on straight lines through points.

    Before the first point, the line passes through the origin. Beyond the last, it is at least half as steep as the
    line from there to the origin: noise may make the last points equal.
    """
    first, last = (0, 0.0), points[0]
    for point in points[1:]:
        if at <= last[0]:
            break
        first, last = last, point
    slope = (last[1] - first[1]) / (last[0] - first[0])
    if at > last[0]:
        return last[1] + (at - last[0]) * max(slope, last[1] / last[0] / 2)
    return last[1] + (at - last[0]) * slope


def _fraction(fractions: Mapping[int, float], examples: int) -> float:
    return _interpolated([(each, fraction * each) for each, fraction in fractions.items()], examples) / examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Workers with the same devices.

    Attributes:
      workers: Number of workers, usually one per host.
      devices: Number of devices per worker.
      flops: FLOPs per second that a device reaches in a training step, without `measured_rates`; with them, only for
        information.
      worker_flops: FLOPs per second of all devices of a worker together, which is less than the sum if they share
        cores; 0: `devices` times `flops`.
      measured_rates: Measured rates of a device; None: `flops`, and `memory_bandwidth` in updates.
      cores: Number of processor cores of a machine, if processor time was measured; otherwise 0.
      sharing: Number of devices, of one or several workers, that share these cores.
      memory: Bytes of memory of a device; 0 if unknown.
      memory_bandwidth: Bytes per second that sums over devices read and write.
      within: The link between the devices of a worker.
      between: The link between the workers.
      fused: Bytes of activations in a compiled pass, as a fraction of those that its graph keeps, by the number of
        examples, ascending; see `memory`.
      fused_in_stages: The same in passes that are a program each, for all numbers of examples.
      fleeting: What the backward program of such passes holds beside, as `fused`.
      shares_memory: Whether the devices of a worker share its memory, as those of a CPU do.
    """

    workers: int = 1
    devices: int = 1
    flops: float = 1e12
    worker_flops: float = 0.0
    measured_rates: Rates | None = None
    cores: int = 0
    sharing: int = 1
    memory: int = 0
    memory_bandwidth: float = 8e9
    within: Link = _WITHIN
    between: Link = _BETWEEN
    fused: Mapping[int, float] = dataclasses.field(default_factory=lambda: {1: 0.7})
    fused_in_stages: float = 0.5
    fleeting: Mapping[int, float] = dataclasses.field(default_factory=lambda: {1: 0.2})
    shares_memory: bool = False

    @property
    def all_devices(self) -> int:
        """Number of devices of all workers."""
        return self.workers * self.devices

    def fused_for(self, examples: int) -> float:
        """Returns `fused` for a number of examples, from a straight line between the bytes of others."""
        return _fraction(self.fused, examples)

    def fleeting_for(self, examples: int) -> float:
        """Returns `fleeting`, as `fused_for`."""
        return _fraction(self.fleeting, examples)

    @property
    def rates(self) -> Rates:
        """The rates of a device, measured or not."""
        if self.measured_rates:
            return self.measured_rates
        memory = self.memory_bandwidth
        return Rates(passes={OPS: [Point(1, 1 / self.flops)]}, updates={OPS: memory}, adding=memory)

    @property
    def crowding(self) -> float:
        """Factor by which work slows down when all devices of a worker are busy; 1 if they share nothing."""
        return max(1.0, self.devices * self.flops / self.worker_flops) if self.worker_flops else 1.0


def parse_size(text: str, flag: str = "--device_memory") -> int:
    """Returns the bytes that a text such as `16GiB`, `500M` or `1e9` stands for; units are powers of 1,024.

    Args:
      text: The text; 0 bytes if empty.
      flag: The flag that the text is from; named in errors.

    Raises:
      ConfigError: The text is not a size, or the size is less than a byte or infinite.
    """
    if not text:
        return 0
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 1 <= size < math.inf:
        raise ConfigError(f"{flag}={text} is not a size. Write a number with a unit, such as {flag}=16GiB or 500MiB.")
    return int(size)


def parse_link(text: str, flag: str, latency: float) -> Link:
    """Returns the link that a text such as `10gbit` or `100gbit,20us` describes: a rate and the time of an empty
    message.

    Args:
      text: The text.
      flag: The flag that the text is from; named in errors.
      latency: Seconds that an empty message takes, if the text does not give them.

    Raises:
      ConfigError: The text is not a link.
    """
    match = _RATE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ConfigError(
            f"{flag}={text} is not a link. Write its rate, such as {flag}=10gbit, or {flag}=100gbit,20us."
        )
    if match[3]:
        latency = float(match[3]) * (1e-3 if match[4].lower() == "ms" else 1e-6)
    return Link(latency, float(match[1]) * _RATES[match[2].lower()] / 8)


def format_size(size: float) -> str:
    """Formats bytes as text, e.g. `5.1 GiB`."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            value = size / scale
            return f"{value:.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    return f"{size:.0f} bytes"

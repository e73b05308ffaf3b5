"""The devices and links for which a plan is made, as plain data."""

from __future__ import annotations

import dataclasses
import re

from tfpar.collectives.cost_model import Link
from tfpar.config import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_RATES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])bit(?:/s)?(?:,\s*(\d+(?:\.\d+)?)\s*(ms|us))?", re.IGNORECASE)


# Measured for TensorFlow's collectives between logical devices of a process, and over 10 Gbit/s between processes.
_WITHIN, _BETWEEN = Link(2e-4, 1e9), Link(1e-3, 1.25e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Workers with the same devices.

    Attributes:
      workers: Number of workers, usually one per host.
      devices: Number of devices per worker.
      flops: FLOPs per second that a device reaches in a training step while the others are idle.
      worker_flops: FLOPs per second of all devices of a worker together, which is less than the sum if they share
        cores; 0: `devices` times `flops`.
      pass_seconds: Fixed time of a forward and backward pass of a micro-batch, in addition to its FLOPs.
      memory: Bytes of memory of a device; 0 if unknown.
      memory_bandwidth: Bytes per second that an optimizer reads and writes.
      within: The link between the devices of a worker.
      between: The link between the workers.
      fused: Bytes of activations in a compiled pass, as a fraction of those that its graph keeps; see `memory`.
    """

    workers: int = 1
    devices: int = 1
    flops: float = 1e12
    worker_flops: float = 0.0
    pass_seconds: float = 0.0
    memory: int = 0
    memory_bandwidth: float = 8e9
    within: Link = _WITHIN
    between: Link = _BETWEEN
    fused: float = 0.7

    @property
    def all_devices(self) -> int:
        """Number of devices of all workers."""
        return self.workers * self.devices

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
      ConfigError: The text is not a size.
    """
    if not text:
        return 0
    match = _SIZE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ConfigError(f"{flag}={text} is not a size. Write a number with a unit, such as {flag}=16GiB or 500MiB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


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

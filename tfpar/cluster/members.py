"""The list of processes that a scheduler's environment describes.

Slurm and Kubernetes both come down to the same `Members`: the addresses of all processes, in order, and the place of
this one among them. `tfpar.cluster.info` gives them their jobs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from tfpar.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Members:
    """All processes of a cluster.

    Attributes:
      source: `slurm` or `kubernetes`.
      addresses: `host:port` of every process, in order.
      rank: Which of them this one is, from 0.
    """

    source: str
    addresses: tuple[str, ...]
    rank: int


def expand_hostlist(text: str) -> list[str]:
    """Expands Slurm's notation: `n[1-2,7],m5` is n1, n2, n7, m5, in this order; zero padding is kept.

    Args:
      text: Names and bracketed ranges, separated by commas. Several brackets in one name (`r[1-2]n[1-2]`)
        and text after a bracket are understood, which TensorFlow 2.21's resolver refuses.

    Raises:
      ConfigError: A range that is not `number` or `low-high`.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        names = [""]
        for piece in re.split(r"(\[[^\]:]*\])", part.strip()):  # brackets with colons are IPv6 addresses
            is_range = piece.startswith("[") and piece.endswith("]")
            values = _expand_ranges(piece[1:-1], text) if is_range else [piece]
            names = [name + value for name in names for value in values]
        hosts += [name for name in names if name]
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    values: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise ConfigError(f"Host list {text!r}: {part!r} is not a number or a range low-high, as in 'n[1-3,7]'.")
        values += [str(n).zfill(len(match[1])) for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return values


def integer_variable(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number in a variable, or the default where it is empty or not set.

    Raises:
      ConfigError: It is not a whole number.
    """
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number.") from None

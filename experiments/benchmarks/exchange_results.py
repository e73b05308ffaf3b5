"""The results of `exchange.py`, in memory and in its JSON file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

Cell = tuple[str, int, str, str]  # model, hosts, link, exchange


@dataclasses.dataclass(frozen=True)
class Measured:
    """A result.

    Attributes:
      seconds: Seconds of each call, of the slowest worker.
      sent: Bytes that the interface of the host that sends most has sent in a call.
      formula: Bytes it should send; None where there is no formula.
      payload: Bytes that one worker encodes.
      predicted_ms: By the cost model of tfpar, from what it measures on the link; None for what is not tfpar's.
      beyond_ms: The same for the numbers of hosts in --beyond.
      about: The exchange in words.
      load: Of the machine before, an average over a minute.
      peak_memory: Bytes, of the worker that took most; over all that this process has measured.
      cpu_seconds: Of the processors, user and system, of all workers, for an exchange; 0 where it was not measured.
      error: Why there is no result.
    """

    seconds: list[float]
    sent: float = 0.0
    formula: int | None = None
    payload: int = 0
    predicted_ms: float | None = None
    beyond_ms: list[float | None] = dataclasses.field(default_factory=list)
    about: str = ""
    load: float = 0.0
    peak_memory: int = 0
    cpu_seconds: float = 0.0
    error: str = ""

    @property
    def ms(self) -> float:
        """Milliseconds of an exchange."""
        return 1e3 * statistics.median(self.seconds)


@dataclasses.dataclass
class Results:
    """All results, and what they were measured with and on."""

    machine: dict[str, str]
    cells: dict[Cell, Measured]

    @classmethod
    def read(cls, path: Path) -> Results:
        """What a run before has written."""
        stored = json.loads(path.read_text())
        cells = {tuple(entry.pop("cell")): Measured(**entry) for entry in stored["cells"]}
        return cls(stored["machine"], {cell: result for cell, result in cells.items() if not result.error})

    def write(self, path: Path) -> None:
        """Aside first: a run that is ended while it writes keeps what it had."""
        cells = [{"cell": cell, **dataclasses.asdict(result)} for cell, result in self.cells.items()]
        aside = path.with_name(f"{path.name}.part")
        aside.write_text(json.dumps({"machine": self.machine, "cells": cells}, indent=1))
        aside.replace(path)

"""The journal of deliveries: a file that records each delivery before the model learns from it, and loses no entry.

A delivery is a set of files that the model learns from together, in one pass. The journal records which steps of the
run belong to a delivery. The newest checkpoint therefore determines which examples have been learned, and after a crash
at any point, the next start continues with the rest of the current delivery: the model learns from every example
exactly once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from tfpar.config import ConfigError

_FORMAT = 1
NAME = "deliveries.json"


@dataclasses.dataclass(frozen=True)
class ArrivedFile:
    """A file in the watched directory.

    Attributes:
      name: Path relative to the directory, with forward slashes.
      size: Size in bytes.
      modified: Time of the last change, in nanoseconds since 1970.
      examples: Number of examples; 0 if they have not been counted.
    """

    name: str
    size: int
    modified: int
    examples: int = 0

    @property
    def identity(self) -> tuple[str, int, int]:
        """The identity of the file, which a later file of the same name does not share."""
        return self.name, self.size, self.modified


@dataclasses.dataclass(frozen=True)
class Delivery:
    """Files that the model learns from together.

    Attributes:
      number: Number of the delivery, from 1.
      files: The files, in the order of their examples.
      first_step: Number of steps of the run before this delivery.
      steps: Number of steps of this delivery.
    """

    number: int
    files: tuple[ArrivedFile, ...]
    first_step: int
    steps: int

    @property
    def examples(self) -> int:
        """Number of examples in all its files."""
        return sum(file.examples for file in self.files)

    @property
    def end(self) -> int:
        """The step of the run at which this delivery is complete."""
        return self.first_step + self.steps

    @classmethod
    def from_json(cls, value: Any) -> Delivery:
        """Returns the delivery from the result of `dataclasses.asdict`."""
        return cls(**{**value, "files": tuple(ArrivedFile(**file) for file in value["files"])})


class Journal:
    """The deliveries of a run, and the files that were skipped. Only the chief has a journal.

    Args:
      workdir: Directory of the run.

    Attributes:
      deliveries: All deliveries so far.
      skipped: Unusable files, each with the reason.

    Raises:
      ConfigError: The file in the workdir cannot be read.
    """

    def __init__(self, workdir: str) -> None:
        self._path = pathlib.Path(workdir) / NAME
        self.deliveries: list[Delivery] = []
        self.skipped: list[tuple[ArrivedFile, str]] = []
        if not self._path.exists():
            return
        try:
            saved = json.loads(self._path.read_text())
            if saved["format"] != _FORMAT:
                raise ValueError(f"its format is {saved['format']!r}, not {_FORMAT}")
            self.deliveries = [Delivery.from_json(each) for each in saved["deliveries"]]
            self.skipped = [(ArrivedFile(**each["file"]), str(each["reason"])) for each in saved["skipped"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._path} records which files were learned, and cannot be read: {error}. Restore it, or start in "
                "another --workdir, with --warm_start for the weights."
            ) from error

    @property
    def known(self) -> set[tuple[str, int, int]]:
        """Identities of all files in the journal."""
        delivered = {file.identity for delivery in self.deliveries for file in delivery.files}
        return delivered | {file.identity for file, _ in self.skipped}

    @property
    def steps(self) -> int:
        """Number of steps of all deliveries."""
        return self.deliveries[-1].end if self.deliveries else 0

    def deliver(self, files: list[ArrivedFile], steps: int) -> Delivery:
        """Adds a delivery and writes it to the disk before returning.

        Args:
          files: The files of the delivery.
          steps: Number of steps that it takes.
        """
        delivery = Delivery(len(self.deliveries) + 1, tuple(files), self.steps, steps)
        self.deliveries.append(delivery)
        self._write()
        return delivery

    def reject(self, file: ArrivedFile, reason: str) -> None:
        """Adds an unusable file. A file that replaces it later counts as another file."""
        self.skipped.append((file, reason))
        self._write()

    def _write(self) -> None:
        content = {
            "format": _FORMAT,
            "deliveries": [dataclasses.asdict(each) for each in self.deliveries],
            "skipped": [{"file": dataclasses.asdict(file), "reason": reason} for file, reason in self.skipped],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{NAME}")
        with open(temporary, "w") as stream:
            json.dump(content, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

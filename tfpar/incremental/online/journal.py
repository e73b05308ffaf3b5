"""The journal of deliveries: a file that records each delivery before the model learns from it, and loses no entry.

A delivery is a set of files that the model learns from together, in one pass. The journal records which steps of the
run belong to a delivery. The newest checkpoint therefore determines which examples have been learned, and after a crash
at any point, the next start continues with the rest of the current delivery: the model learns from every example
exactly once.

```
{"format": 2}
{"delivery": {"number": 1, "files": [...], "first_step": 0, "steps": 5}}
{"skipped": {"name": ...}, "reason": "it has no examples"}
{"repeated": [{"name": ...}]}
```

Each entry is a line, and is on the disk before the program goes on. A crash while a line is written leaves an
incomplete last line, which nothing was learned from: it is ignored, and the next entry replaces it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from tfpar.checkpoint.checkpointer import CheckpointError
from tfpar.config import ConfigError
from tfpar.process.whole_files import replace_file, sync_directory
from tfpar.process.writable import write_reason

_FORMAT, _OLD_FORMAT = 2, 1
NAME = "deliveries.jsonl"
OLD_NAME = "deliveries.json"  # one JSON document with all entries, from earlier versions


@dataclasses.dataclass(frozen=True)
class ArrivedFile:
    """A file in the watched directory.

    Attributes:
      name: Path relative to the directory, with forward slashes.
      size: Size in bytes.
      modified: Time of the last change, in nanoseconds since 1970.
      examples: Number of examples; 0 if they have not been counted.
      content: Digest of what the file says: its bytes and, where the folder determines the class, the class; empty if
        not computed.
    """

    name: str
    size: int
    modified: int
    examples: int = 0
    content: str = ""

    @property
    def identity(self) -> tuple[str, int, int]:
        """What a scan tells a file by without reading it; a later file of the same name does not share it."""
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
    """The deliveries of a run, and the files that were left out. Only the chief has a journal.

    Args:
      workdir: Directory of the run.
      content_of: Computes `ArrivedFile.content` of a file, for journals of earlier versions, which lack it; empty if
        the file is gone or has changed.

    Attributes:
      deliveries: All deliveries so far.
      skipped: Unusable files, each with the reason.
      repeated: Files with the content of a delivered file.
      known: Identities of all files in the journal.
      contents: Contents of all delivered files.

    Raises:
      ConfigError: The file in the workdir cannot be read.
    """

    def __init__(self, workdir: str, content_of: Callable[[ArrivedFile], str] = lambda _: "") -> None:
        self._path = pathlib.Path(workdir) / NAME
        self._length = 0  # bytes of the complete lines; 0 if there is no file of this format
        self.deliveries: list[Delivery] = []
        self.skipped: list[tuple[ArrivedFile, str]] = []
        self.repeated: list[ArrivedFile] = []
        self.known: set[tuple[str, int, int]] = set()
        self.contents: set[str] = set()
        self._examples = [0]  # of all deliveries before each, and of all
        old = self._path.with_name(OLD_NAME)
        path = self._path if self._path.exists() else old
        try:
            if path.exists():
                self._read_old(path, content_of) if path == old else self._read()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} records which files were learned, and cannot be read: {error}. Restore it, or start in "
                "another --workdir, with --warm_start for the weights."
            ) from error

    @property
    def steps(self) -> int:
        """Number of steps of all deliveries."""
        return self.deliveries[-1].end if self.deliveries else 0

    def examples(self, number: int) -> int:
        """Returns the number of examples in the first deliveries, up to a number."""
        return self._examples[number]

    def deliver(self, files: list[ArrivedFile], steps: int) -> Delivery:
        """Adds a delivery and writes it to the disk before returning.

        Args:
          files: The files of the delivery.
          steps: Number of steps that it takes.
        """
        delivery = Delivery(len(self.deliveries) + 1, tuple(files), self.steps, steps)
        self._add({"delivery": dataclasses.asdict(delivery)})
        return delivery

    def reject(self, file: ArrivedFile, reason: str) -> None:
        """Adds an unusable file. A file that replaces it later counts as another file."""
        self._add({"skipped": dataclasses.asdict(file), "reason": reason})

    def repeat(self, files: Sequence[ArrivedFile]) -> None:
        """Adds files with the contents of delivered files."""
        self._add({"repeated": [dataclasses.asdict(file) for file in files]})

    def _take(self, entry: Mapping[str, Any]) -> None:
        """Adds an entry to the attributes."""
        if "delivery" in entry:
            delivery = Delivery.from_json(entry["delivery"])
            if (delivery.number, delivery.first_step) != (len(self.deliveries) + 1, self.steps):
                raise ValueError(f"delivery {delivery.number} does not follow delivery {len(self.deliveries)}")
            self.deliveries.append(delivery)
            self._examples.append(self._examples[-1] + delivery.examples)
            self.known.update(file.identity for file in delivery.files)
            self.contents.update(file.content for file in delivery.files if file.content)
        elif "skipped" in entry:
            file = ArrivedFile(**entry["skipped"])
            self.skipped.append((file, str(entry["reason"])))
            self.known.add(file.identity)
        else:
            files = [ArrivedFile(**file) for file in entry["repeated"]]
            self.repeated += files
            self.known.update(file.identity for file in files)

    def _read(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        if not lines or json.loads(lines[0])["format"] != _FORMAT:
            raise ValueError(f"its first line is not the format {_FORMAT}")
        self._length = len(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                if number < len(lines):
                    raise
                entry = None
            if entry is None:  # the last line, which a crash has cut off
                return
            self._take(entry)
            self._length += len(line)

    def _read_old(self, path: pathlib.Path, content_of: Callable[[ArrivedFile], str]) -> None:
        saved = json.loads(path.read_text())
        if saved["format"] != _OLD_FORMAT:
            raise ValueError(f"its format is {saved['format']!r}, not {_OLD_FORMAT}")
        for delivery in saved["deliveries"]:
            files = [{**file, "content": content_of(ArrivedFile(**file))} for file in delivery["files"]]
            self._take({"delivery": {**delivery, "files": files}})
        for each in saved["skipped"]:
            self._take({"skipped": each["file"], "reason": each["reason"]})

    def _entries(self) -> Iterator[Mapping[str, Any]]:
        """What a journal of an earlier version says, in this format."""
        yield {"format": _FORMAT}
        yield from ({"delivery": dataclasses.asdict(each)} for each in self.deliveries)
        yield from ({"skipped": dataclasses.asdict(file), "reason": reason} for file, reason in self.skipped)

    def _add(self, entry: Mapping[str, Any]) -> None:
        """Writes an entry to the disk, then adds it to the attributes.

        Raises:
          CheckpointError: It cannot be written. The file has all earlier entries.
        """
        try:
            if self._length:
                self._append(_line(entry))
            else:
                self._create(b"".join(map(_line, itertools.chain(self._entries(), [entry]))))
        except OSError as error:
            raise CheckpointError(
                f"{self._path} records which files are learned, and cannot be written ({write_reason(error)}), so no "
                "more of them are. Free space, or make it writable, and start again: the run goes on where it ended."
            ) from error
        self._take(entry)

    def _append(self, line: bytes) -> None:
        """Writes a line behind the complete ones."""
        with open(self._path, "r+b") as stream:
            stream.truncate(self._length)
            stream.seek(self._length)
            _write(stream, line)
        self._length += len(line)

    def _create(self, content: bytes) -> None:
        """Writes the file atomically, also in place of that of an earlier version."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, content)
        sync_directory(self._path.parent)
        self._length = len(content)
        self._path.with_name(OLD_NAME).unlink(missing_ok=True)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _write(stream: IO[bytes], content: bytes) -> None:
    stream.write(content)
    stream.flush()
    os.fsync(stream.fileno())

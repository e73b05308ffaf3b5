"""Files in the watched directory: which are complete, their examples, and the errors of bad files."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from tfpar.config import ConfigError, InputConfig
from tfpar.incremental.online.journal import ArrivedFile
from tfpar.inputs.bad_records import locate_bad_example
from tfpar.inputs.source import Source, SourceInfo
from tfpar.inputs.sources import images, tfrecord

STOP = "STOP"  # a file of this name ends the run once everything else in the directory is learned
# Names of files that programs are still writing.
_UNFINISHED = (".tmp", ".part", ".partial", ".crdownload")

_CHUNK = 1 << 20  # bytes


class Form(Protocol):
    """A reader for one kind of file.

    Attributes:
      reads: The kind with its article, for messages.
    """

    reads: str

    def takes(self, name: str) -> bool:
        """Whether a file of this name, relative to the directory, may hold examples."""

    def label(self, name: str) -> str:
        """The class that the name of a file says; empty if the file says the classes of its examples itself."""

    def source(self, root: str, names: Sequence[str]) -> Source:
        """Returns the examples of files, in this order.

        Raises:
          ConfigError: One of them cannot be read.
        """


class _Shards:
    reads = "a .tfrecord file"

    def __init__(self, config: InputConfig, argument: str) -> None:
        self._config, self._features = config, tfrecord.features_of(argument)

    def takes(self, name: str) -> bool:
        return name.endswith(".tfrecord")

    def label(self, name: str) -> str:
        return ""

    def source(self, root: str, names: Sequence[str]) -> Source:
        paths = [os.path.join(root, name) for name in names]
        return tfrecord.from_files("tfrecord (delivered)", self._config, "train", paths, self._features)


class _Images:
    reads = f"an image ({', '.join(images.SUFFIXES)})"

    def __init__(self, config: InputConfig, info: SourceInfo) -> None:
        self._config, self._classes = config, info.class_names

    def takes(self, name: str) -> bool:
        return name.lower().endswith(images.SUFFIXES)

    def label(self, name: str) -> str:
        return name.partition("/")[0]

    def source(self, root: str, names: Sequence[str]) -> Source:
        labels = []
        for name in names:
            folder = self.label(name)
            if folder not in self._classes or "/" not in name:
                raise ConfigError(f"it is not in the folder of a class; the classes are {', '.join(self._classes)}")
            labels.append(self._classes.index(folder))
        paths = [os.path.join(root, name) for name in names]
        return images.from_files("images (delivered)", self._config, "train", self._classes, paths, labels)


def form_of(config: InputConfig, info: SourceInfo, watch: str) -> Form:
    """Returns the reader of the files in the watched directory, which have the format of `--dataset`.

    Args:
      config: The input options.
      info: The training examples of `--dataset`.
      watch: The directory.

    Raises:
      ConfigError: Files of this kind of data set cannot be watched, or the directory does not exist.
    """
    if not os.path.isdir(watch):
        raise ConfigError(f"--watch={watch}: no such directory. Create it first.")
    kind, _, argument = config.dataset.partition(":")
    if kind == "tfrecord":
        return _Shards(config, argument)
    if kind == "images":
        return _Images(config, info)
    raise ConfigError(
        f"--watch={watch} reads files in the format of --dataset, which must be images:DIR or tfrecord:GLOB, not "
        f"{config.dataset}. Write other data as shards: python -m tfpar.inputs.write --dataset={config.dataset} "
        "--output=DIR."
    )


class Arrivals:
    """The files that have arrived in a directory.

    Args:
      root: The directory.
      form: The reader of its files.
    """

    def __init__(self, root: str, form: Form) -> None:
        self._root, self._form = root, form
        self._seen: set[tuple[str, int, int]] = set()
        self._foreign: set[str] = set()
        self._new_foreign: set[str] = set()

    @property
    def stops(self) -> bool:
        """Whether the directory has the file that ends the run."""
        return os.path.exists(os.path.join(self._root, STOP))

    def look(self, *known: Collection[tuple[str, int, int]]) -> tuple[list[ArrivedFile], bool]:
        """Scans the directory.

        Args:
          *known: Sets of identities of files to ignore.

        Returns:
          Complete files, which have not changed since the last scan, sorted by time and name; and whether there are
          other files, which are new or still being written.
        """
        found = [file for file in self._files() if not any(file.identity in each for each in known)]
        complete = [file for file in found if file.identity in self._seen]
        self._seen = {file.identity for file in found}
        return sorted(complete, key=lambda file: (file.modified, file.name)), len(complete) < len(found)

    def unchanged(self, files: Sequence[ArrivedFile]) -> list[ArrivedFile]:
        """Returns those of the files that still exist and have not changed."""
        return [file for file in files if self._now(file.name) == (file.size, file.modified)]

    def content(self, file: ArrivedFile) -> str:
        """Returns `ArrivedFile.content` of a file; empty if the file is gone, has changed or cannot be read."""
        digest = self._digest(file.name)
        return digest if self.unchanged([file]) else ""

    def holds(self, file: ArrivedFile) -> bool:
        """Whether a delivered file is there with its contents, whatever its time. Reads it only if that differs."""
        return bool(self.unchanged([file])) or not file.content or self._digest(file.name) == file.content

    def _digest(self, name: str) -> str:
        """Returns the digest of what a file says now; empty if it is gone or cannot be read."""
        digest = hashlib.blake2b(os.fsencode(self._form.label(name)) + b"\0", digest_size=16)
        try:
            with open(os.path.join(self._root, name), "rb") as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
        except OSError:
            return ""
        return digest.hexdigest()

    def _now(self, name: str) -> tuple[int, int] | None:
        """Returns size and time of the last change of a file; None if it does not exist."""
        try:
            status = os.stat(os.path.join(self._root, name))
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns

    def new_foreign(self) -> list[str]:
        """Returns the names of files of another kind that scans have found since the last call."""
        names = sorted(self._new_foreign)
        self._foreign |= self._new_foreign
        self._new_foreign.clear()
        return names

    def check(self, files: Sequence[ArrivedFile]) -> tuple[list[ArrivedFile], list[tuple[ArrivedFile, str]]]:
        """Reads files and counts their examples.

        Returns:
          The usable files, with their numbers of examples; and the unusable files, each with the reason.
        """
        good, bad, counts = [], [], []
        for file in files:
            try:
                count = self._form.source(self._root, [file.name]).info.num_examples
                if not count:
                    raise ConfigError("it has no examples")
            except ConfigError as error:
                bad.append((file, str(error)))
            else:
                good.append(file)
                counts.append(count)
        reasons: dict[str, str] = {}
        if good:
            source = self._form.source(self._root, [file.name for file in good])
            total = source.info.num_examples
            for example in locate_bad_example(source, range(total), limit=total):
                name = pathlib.Path(example.file).relative_to(self._root).as_posix()
                reasons.setdefault(name, example.describe(source.info))
        bad += [(file, reasons[file.name]) for file in good if file.name in reasons]
        taken = [
            dataclasses.replace(file, examples=count)
            for file, count in zip(good, counts, strict=True)
            if file.name not in reasons
        ]
        return taken, bad

    def _files(self) -> Iterator[ArrivedFile]:
        for folder, folders, names in os.walk(self._root):
            folders[:] = [each for each in folders if not each.startswith(".")]
            for each in names:
                name = (pathlib.Path(folder) / each).relative_to(self._root).as_posix()
                if each.startswith(".") or each.endswith(_UNFINISHED) or name == STOP:
                    continue
                if not self._form.takes(name):
                    if name not in self._foreign:
                        self._new_foreign.add(name)
                    continue
                if now := self._now(name):  # else the file was renamed in the meantime
                    yield ArrivedFile(name, *now)

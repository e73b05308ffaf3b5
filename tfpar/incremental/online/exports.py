"""Versions of the model, each a directory that appears atomically: `WORKDIR/exports/000012/model.keras`."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from tfpar.process.whole_files import sync_directory, write_file

NEWEST = "newest"  # a link to the newest version


class Exports:
    """The exported models of a run.

    Args:
      workdir: Directory of the run, with the `model.keras` to export.
      keep: Number of newest versions to keep.
    """

    def __init__(self, workdir: str, keep: int) -> None:
        self._model = pathlib.Path(workdir) / "model.keras"
        self._directory = pathlib.Path(workdir) / "exports"
        self._keep = keep

    def has(self, version: int) -> bool:
        """Whether a version, or a later one, has been exported."""
        return any(number >= version for number in self._versions())

    def add(self, version: int, about: Mapping[str, Any]) -> pathlib.Path:
        """Exports the current model, and removes versions that are too old.

        Args:
          version: Number of the version.
          about: Contents of the version's `about.json`.

        Returns:
          The directory of the version.
        """
        target = self._directory / f"{version:06d}"
        if not target.exists():
            self._directory.mkdir(exist_ok=True)
            temporary = self._directory / f".{version:06d}"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                os.link(
                    self._model, temporary / self._model.name
                )  # safe: the run replaces its file, but never changes it in place
            except OSError:  # the file system does not support links
                with open(shutil.copyfile(self._model, temporary / self._model.name), "rb") as copy:
                    os.fsync(copy.fileno())
            write_file(temporary / "about.json", (json.dumps(about, indent=1) + "\n").encode())
            sync_directory(temporary)
            os.rename(temporary, target)
            sync_directory(self._directory)
        link = self._directory / f".{NEWEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        os.replace(link, self._directory / NEWEST)
        for number in self._versions()[: -self._keep]:
            shutil.rmtree(self._directory / f"{number:06d}", ignore_errors=True)
        return target

    def _versions(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

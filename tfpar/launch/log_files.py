"""`--log_dir`: a copy of the output of every process, in files of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

from tfpar.config import ConfigError

_NAME = re.compile(r"(chief|worker|ps)_\d+\.log")


def path_of(directory: Path, label: str) -> Path:
    """The log file of a process.

    Args:
      directory: Of the logs.
      label: Of the process: `worker 0`.
    """
    return directory / f"{label.replace(' ', '_')}.log"


def begin(directory: Path) -> None:
    """Makes the directory, and removes the logs of an earlier cluster, which may have had more processes.

    Raises:
      ConfigError: The directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            if _NAME.fullmatch(path.name):
                path.unlink()
    except OSError as error:
        raise _cannot_write(directory, error) from error


def opened(path: Path) -> BinaryIO:
    """A log file, opened to append to it.

    Raises:
      ConfigError: It cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it since `begin`
        return path.open("ab")
    except OSError as error:
        raise _cannot_write(path.parent, error) from error


def _cannot_write(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--log_dir={directory}: {error.filename or directory} cannot be written ({error.strerror}). Name a writable "
        "directory."
    )

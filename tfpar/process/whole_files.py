"""Files that are whole or not there: written beside their place, flushed to the disk, and renamed."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib

_log = logging.getLogger(__name__)


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file and flushes it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: pathlib.Path, content: bytes, *, flush: bool = True) -> None:
    """Writes a file atomically: its name leads to the old content or to the new one.

    Args:
      path: The file. Its directory must exist.
      content: The new content.
      flush: Whether to flush the new content to the disk before it gets its name, so that it also outlives a power
        failure. That takes time, and a file that is written many times a second is worth less.

    Raises:
      OSError: It could not be written. The old content is unchanged, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        if flush:
            write_file(temporary, content)
        else:
            temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # it may be what fills the disk
        raise


def sync_directory(path: pathlib.Path) -> None:
    """Flushes the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_names(name: str, *directories: pathlib.Path) -> None:
    """Flushes the names in directories to the disk once a file or directory has its own; a failure is a warning.

    What is written is there, and whole, for whoever looks for it: to call it unwritten would be wrong.

    Args:
      name: What was put in place.
      directories: The one where it is, and those above it that may be new.
    """
    for directory in directories:
        try:
            sync_directory(directory)
        except OSError as error:
            _log.warning(
                "%s is written, but %s cannot be flushed (%s): a power failure within the next seconds may undo it",
                *(name, directory, error.strerror or error),
            )

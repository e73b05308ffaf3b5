"""Places that a program will write to or read: tried before its work, and what went wrong if writing fails all the
same."""

from __future__ import annotations

import errno
import os
import pathlib
import tempfile

_REASONS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES))


def write_error(path: str | os.PathLike[str]) -> tuple[pathlib.Path, OSError] | None:
    """What keeps a file or directory from being created, or a directory from being written to.

    Writes a file without a name where `path` is or would be: permission bits are not conclusive (root, read-only
    systems, /proc).

    Args:
      path: It and the directories above it need not exist.

    Returns:
      The directory that cannot be written to and the error of the system; None if all is well.
    """
    existing = nearest_existing(path)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return existing, error


def nearest_existing(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path itself if it exists, otherwise the nearest directory above it that does."""
    path = pathlib.Path(path)
    # `Path.exists` raises an error within a directory that may not be searched (Python 3.11).
    return next(parent for parent in [path, *path.absolute().parents] if os.path.exists(parent))


def read_error(path: str | os.PathLike[str]) -> OSError | None:
    """What keeps a file or directory from being read, or a directory from being searched; None if there is no such
    path, or all is well.

    `os.path.exists`, `os.path.isdir`, `glob` and `os.walk` cannot tell what is not there from what may not be seen.
    """
    for tried in (path, os.path.join(path, ".")):  # the latter takes the permission to search
        try:
            os.close(os.open(tried, os.O_RDONLY | os.O_NONBLOCK))  # a pipe has no writer yet
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return error
    return None


def unwritable(flag: str, path: str | os.PathLike[str]) -> str | None:
    """The message for a user whose flag names a place that cannot be written to; None if it can.

    Args:
      flag: The flag, as in `"--output"`.
      path: Its value.
    """
    found = write_error(path)
    return unwritable_message(flag, path, *found) if found else None


def unwritable_message(flag: str, path: str | os.PathLike[str], existing: pathlib.Path, error: OSError) -> str:
    """The message for what `write_error` found."""
    return f"{flag}={path}: {existing} cannot be written to ({error.strerror}). Name a writable directory."


def write_reason(error: Exception) -> str:
    """Why writing failed, in a few words; TensorFlow's errors have the system's words somewhere in theirs."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next((reason for reason in _REASONS if reason in str(error)), str(error))

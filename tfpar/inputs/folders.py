"""The files below a directory."""

from __future__ import annotations

import os

from tfpar.config import ConfigError


def files_below(root: str, name: str) -> list[str]:
    """Returns the sorted relative paths, with `/`, of all visible files below a directory, without following links.

    Hidden folders hold copies, such as `.ipynb_checkpoints`.

    Args:
      root: The directory; one that is missing has no files.
      name: The data set, for errors, such as `--dataset=text:DIR`.

    Raises:
      ConfigError: A directory may not be read; its files would be left out without a word.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise ConfigError(
                f"{name}: {error.filename!r} cannot be read ({error.strerror}). Give yourself the permission to read "
                "it and to search the directories above it, or move it elsewhere."
            ) from error

    names = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [each for each in folders if not each.startswith(".")]
        relative = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if relative == "." else f"{relative}/"
        names += [prefix + each for each in files if not each.startswith(".")]
    return sorted(names)

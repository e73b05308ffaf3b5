"""Recognises `.keras` files without loading them or TensorFlow."""

from __future__ import annotations

import os
import zipfile

from tfpar.config import ConfigError


def check_model_file(path: str, *, flag: str = "--model_file") -> None:
    """Refuses a path that is not a `.keras` file, without loading it.

    Args:
      path: The file.
      flag: The flag that named the file, for errors.

    Raises:
      ConfigError: No such file, or another kind of file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            complete = {"config.json", "metadata.json"} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        complete = False
    if not complete:
        what = "is not a .keras file" if os.path.exists(path) else "does not exist"
        raise ConfigError(f"{flag}={path} {what}. A finished run leaves a .keras file as WORKDIR/model.keras.")

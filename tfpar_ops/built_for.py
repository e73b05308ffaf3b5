"""What the native library was built for, and whether that is the TensorFlow of this environment.

Loading a library that was built for another TensorFlow may end the process, so that this is known from a file beside
it. This module does not import TensorFlow.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

FILE = "libtfpar_ops.so"
FACTS = "libtfpar_ops.json"  # written by CMake, copied by setup.py
# Distributions that bring the package `tensorflow`.
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")


class LibraryError(ImportError):
    """The native library cannot be used, and why."""


def check_tensorflow(folder: Path = Path(__file__).parent) -> None:
    """Checks that the library of a folder was built for the TensorFlow that is installed.

    Passes where there is no library (the reference takes its place), where no TensorFlow is found, and with
    `TFPAR_OPS=reference`.

    Raises:
      LibraryError: It was built for another TensorFlow, with what to do.
    """
    if os.environ.get("TFPAR_OPS") == "reference" or not (folder / FILE).exists():
        return
    try:
        built = str(read(folder).get("tensorflow", ""))
    except LibraryError:  # library.load says what is wrong, and the reference takes its place
        return
    here = _installed()
    if not built or not here or _normalized(built) == _normalized(here):
        return
    minor = ".".join(here.split(".")[:2])
    raise LibraryError(
        f"tfpar_ops was built for TensorFlow {built}, and {here} is installed. Install the wheel of tfpar for it (its "
        f"version ends in +tf{minor}), or tensorflow=={built}; in a checkout, `make setup` builds the library again. "
        "TFPAR_OPS=reference does without the library, which is slower."
    )


def read(folder: Path) -> dict[str, Any]:
    """What the library of a folder was built with and for.

    Raises:
      LibraryError: There is no library, or nothing that says so.
    """
    if not (folder / FILE).exists():
        raise LibraryError("the native library is not built.")
    try:
        facts = json.loads((folder / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise LibraryError(f"{FACTS}, which says what the native library was built for, cannot be read.") from error
    if not isinstance(facts, dict):
        raise LibraryError(f"{FACTS} does not say what the native library was built for.")
    return facts


def _installed() -> str:
    """The version of TensorFlow that is imported, or would be; empty where none is found."""
    loaded = getattr(sys.modules.get("tensorflow"), "__version__", "")
    if loaded:
        return str(loaded)
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _normalized(version: str) -> str:
    return version.replace("-", "")  # TensorFlow says 2.21.0-rc1, its distribution 2.21.0rc1

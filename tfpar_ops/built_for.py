"""What the native library was built for and from, and whether these are the TensorFlow and the sources found here.

Loading a library that was built for another TensorFlow may end the process, so a file beside it
says so. This module imports only the standard library: setup.py runs it too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

FILE = "libtfpar_ops.so"
FACTS = "libtfpar_ops.json"  # written by CMake, copied by setup.py
SOURCES = (".cc", ".cu", ".cuh", ".h")
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


def check_sources(folder: Path = Path(__file__).parent) -> None:
    """Warns if the library of a folder was not built from the native sources beside it, as after a `git pull`.

    Says nothing where no sources lie (a wheel has none), where there is no library, where it is not known from what the
    library was built (Bazel does not say), and with `TFPAR_OPS=reference`.
    """
    if os.environ.get("TFPAR_OPS") == "reference" or not (folder / FILE).exists():
        return
    try:
        built = read(folder).get("sources")
    except LibraryError:
        return
    here = sources_digest(folder)
    if built and here and built != here:
        warnings.warn(
            f"{folder / FILE} was built from other sources than those beside it, and may compute or encode something "
            "else. `make setup` builds it again.",
            RuntimeWarning,
            stacklevel=3,
        )


def sources_digest(folder: Path) -> str:
    """SHA-256, in hexadecimal digits, of names and contents of all native sources of a folder; empty without any."""
    paths = sorted(Path(root, name) for root, _, names in os.walk(folder) for name in names if name.endswith(SOURCES))
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest() if paths else ""


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

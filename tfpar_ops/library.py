"""Finding and loading the native library, or saying why it is not in use."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import threading
import warnings
from pathlib import Path
from typing import Any

from tfpar_ops.built_for import FACTS, FILE, LibraryError, read

import tensorflow as tf

__all__ = ["FACTS", "FILE", "Library", "LibraryError", "build_facts", "library", "load"]

OPERATIONS = (
    "TfparEncode",
    "TfparEncodeResource",
    "TfparDecode",
    "TfparDecodeSum",
    "TfparRecode",
    "TfparRecodeResource",
    "TfparNormSquared",
)
ABI_VERSION = 4  # TFPAR_ABI_VERSION of core/codec.h
CHOICES = ("native", "reference")
CPU_TARGETS = ("baseline", "x86-64-v3", "x86-64-v4")  # of core/codec.h
# C functions that this package calls: result and arguments.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "tfpar_masked_crc32c": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]),
    "tfpar_cpu_target": (ctypes.c_char_p, []),
    "tfpar_end_on_message": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
}
_REBUILD = "`make setup` (in a checkout) or `pip install --no-build-isolation .` builds it."


@dataclasses.dataclass(frozen=True)
class Library:
    """What does the work.

    Attributes:
      operations: The module of the native operations; None where the reference takes their place.
      status: One line about it.
      core: The functions of the same library that take plain memory; None as above.
    """

    operations: Any | None
    status: str
    core: ctypes.CDLL | None = None


_lock = threading.Lock()
_library: Library | None = None


def library() -> Library:
    """The implementation that this process uses, chosen at the first call.

    The environment variable `TFPAR_OPS` decides: `reference`, `native` (an error where the library is missing), or
    nothing: the library if it can be loaded, otherwise the reference, with one warning. `TFPAR_OPS_TARGET` asks the
    library for one of `CPU_TARGETS`; where this processor, or the library, does not have it, a warning says what is
    used instead.

    Raises:
      LibraryError: `TFPAR_OPS=native`, and the library cannot be used.
      ValueError: Another value of `TFPAR_OPS` or `TFPAR_OPS_TARGET`.
    """
    global _library
    with _lock:  # the replicas of a MirroredStrategy are threads
        if _library is None:
            _library = _choose(os.environ.get("TFPAR_OPS", ""))
        return _library


def build_facts() -> dict[str, Any]:
    """What the native library beside this module was built with and for; empty where it is not, or cannot be told."""
    try:
        return read(Path(__file__).parent)
    except LibraryError:
        return {}


def _choose(wanted: str) -> Library:
    for variable, allowed in (("TFPAR_OPS", CHOICES), ("TFPAR_OPS_TARGET", CPU_TARGETS)):
        value = os.environ.get(variable, "")
        if value and value not in allowed:
            raise ValueError(f"{variable}={value!r} is not one of {', '.join(allowed)}; unset, the best is taken")
    if wanted == "reference":
        return Library(None, "reference operations (TFPAR_OPS=reference)")
    try:
        return load(Path(__file__).parent)
    except LibraryError as error:
        if wanted == "native":
            raise LibraryError(f"{error} {_REBUILD}") from error
        warnings.warn(
            f"tfpar_ops: {error} {_REBUILD} Until then the codecs run as plain TensorFlow operations, which is slower.",
            RuntimeWarning,
            stacklevel=4,
        )
        return Library(None, f"reference operations: {error}")


def load(folder: Path) -> Library:
    """Loads the library of a folder.

    Raises:
      LibraryError: It is not there, was built for another TensorFlow or from other sources, or does not load.
    """
    path = folder / FILE
    facts = read(folder)
    for name, built, here in (
        ("TensorFlow", facts.get("tensorflow"), tf.__version__),
        ("the C++ ABI", facts.get("cxx11_abi"), tf.sysconfig.CXX11_ABI_FLAG),
    ):
        if built != here:
            raise LibraryError(f"the native library was built for {name} {built}, and this is {here}.")
    try:
        operations = tf.load_op_library(str(path))
        core = ctypes.CDLL(str(path))
    except (tf.errors.OpError, RuntimeError, OSError) as error:
        raise LibraryError(f"the native library does not load: {error}") from error
    _check_and_declare(core)
    _declare_no_gradients()
    gpu = f"CUDA {facts['cuda']}" if facts.get("cuda") else "no GPU kernels"
    target = core.tfpar_cpu_target().decode()
    asked = os.environ.get("TFPAR_OPS_TARGET") or target
    if asked != target:
        warnings.warn(
            f"TFPAR_OPS_TARGET={asked}: this processor or build of the library does not have it; {target} is used.",
            RuntimeWarning,
            stacklevel=5,
        )
    return Library(operations, f"native operations for TensorFlow {tf.__version__}: CPU {target}, {gpu}", core)


def _check_and_declare(core: ctypes.CDLL) -> None:
    """Checks that the functions are those of this code, and says what they take.

    Raises:
      LibraryError: They are of other sources.
    """
    missing = [name for name in ("tfpar_abi_version", *_FUNCTIONS) if not hasattr(core, name)]
    if missing:
        raise LibraryError(f"the native library was built from other sources than this code: it has no {missing[0]}.")
    version = core.tfpar_abi_version()
    if version != ABI_VERSION:
        raise LibraryError(
            f"the native library was built from other sources than this code: its interface is {version}, not "
            f"{ABI_VERSION}."
        )
    for name, (result, taken) in _FUNCTIONS.items():
        function = getattr(core, name)
        function.restype, function.argtypes = result, taken


@functools.cache
def _declare_no_gradients() -> None:
    """Says of all operations that nothing is differentiable; TensorFlow takes that once in a process."""
    for name in OPERATIONS:
        tf.no_gradient(name)

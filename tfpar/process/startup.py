"""A quiet and quicker start: TensorFlow's own messages of no consequence are kept from the terminal.

What is hidden is chatter about the build and the hardware, never an error: information lines that TensorFlow
2.21 prints while it is imported (before `TF_CPP_MIN_LOG_LEVEL` counts for anything), C++ information and warnings
later, and the Python warnings listed in `_HARMLESS`. Warnings about retracing stay, but for
functions that each run makes anew: in a loop whose shapes are static, a retrace is a defect worth seeing.

TensorFlow and Keras make 300,000 objects while they are imported, all of which stay. Python's collector is spared them,
during the import, of which going through them again and again is a fifth, and for good.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import absl.logging

# Lines that importing TensorFlow writes to standard error on a healthy machine.
_IMPORT_CHATTER = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)"
    r"|I\d{4} \d\d:\d\d:"  # the I of absl's "information"
    r"|\d{4}-\d\d-\d\d [\d:.]+: I "  # the same in the format of TensorFlow 2.17 and before
    r"|To enable the following instructions:"
    r"|.*Unable to register cu\w+ (factory|plugin)"  # TensorFlow 2.16 to 2.18 on GPUs
    r"|.*computation_placer\.cc.*computation placer already registered"
)

# Python warnings of TensorFlow that say nothing is wrong.
_HARMLESS = (
    # MirroredStrategy on CPUs, or on GPUs split into logical ones: there is no NCCL to use.
    "There are non-GPU devices in `tf.distribute.Strategy`, not using nccl allreduce.",
    "NCCL is not supported when using virtual GPUs, falling back to reduction to one device",
    # TFDS 4.9 of its own doing, when it decodes some of the features only.
    "`FeatureConnector.dtype` is deprecated.",
)

_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu", "/dev/kfd")


def quiet_startup(verbose: bool | None = None) -> None:
    """Keeps TensorFlow's start-up messages off the terminal. Call it before TensorFlow is imported.

    May be called again, for example once flags are parsed: with `verbose=True` the Python warnings come back
    (what C++ code prints is decided when TensorFlow is loaded). Variables that the user has set are left alone.

    Args:
      verbose: Whether to leave everything as it is. None: yes if `TFPAR_VERBOSE` is set to a value other than 0,
        or the command line has `--verbose`.
    """
    if verbose is None:
        asked = os.environ.get("TFPAR_VERBOSE", "0") not in ("", "0")
        verbose = asked or any(argument in ("--verbose", "--verbose=true") for argument in sys.argv[1:])
    loggers = (logging.getLogger("tensorflow"), absl.logging.get_absl_logger())
    for logger in loggers:
        logger.removeFilter(_hide_harmless)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _QuietImport)]
    if verbose:
        return
    for logger in loggers:
        logger.addFilter(_hide_harmless)
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", _log_level())
        sys.meta_path.insert(0, _QuietImport())


@contextlib.contextmanager
def filtered_stderr(chatter: re.Pattern[str] = _IMPORT_CHATTER) -> Iterator[None]:
    """Holds back what the process, C++ code included, writes to standard error; lets through what matters at the end.

    Args:
      chatter: Lines that match from their beginning are dropped; all others are written when the context ends.
    """
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (AttributeError, OSError, ValueError):  # no standard error to speak of
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if not chatter.match(line.decode(errors="replace")):
                    os.write(2, line)


@contextlib.contextmanager
def _spared() -> Iterator[None]:
    """Nothing that is made here is garbage: the collector does not look for any, nor ever goes through it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def _log_level() -> str:
    """2 hides C++ warnings. 3 hides errors too: without a GPU, the one at start is that there is no CUDA driver.

    What TensorFlow 2.21 logs as an error and has consequences also reaches Python as an exception.
    """
    return "2" if any(glob.glob(pattern) for pattern in _GPU_FILES) else "3"


def _hide_harmless(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_HARMLESS)


class _QuietImport(importlib.abc.MetaPathFinder):
    """Wraps the first import of TensorFlow, wherever it happens, in `filtered_stderr` and `_spared`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The other finders' answer, with a quiet loader; None for anything but TensorFlow."""
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec else None
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_quietly(module: ModuleType) -> None:
            with filtered_stderr(), _spared():
                execute(module)

        loader.exec_module = execute_quietly
        return spec

"""Keeps TensorFlow's start-up messages of no consequence off the terminal; errors always come through.

`import tfpar` must precede the first import of TensorFlow: TensorFlow 2.21 writes information lines to file descriptor
2 while it is imported, whatever `TF_CPP_MIN_LOG_LEVEL` says, so the import itself has to be wrapped. Imported
afterwards, tfpar works the same, only with those lines. This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tfpar.process.activity import activity
from tfpar.process.after_import import FirstImport

import absl.logging

_IMPORT_CHATTER = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)"
    r"|I\d{4} \d\d:\d\d:"  # the I of absl's "information"
    r"|To enable the following instructions:"
    r"|.*computation_placer\.cc.*computation placer already registered"
)
# Python warnings that are logged though nothing is wrong.
_HARMLESS = (
    # MirroredStrategy on CPUs, or on GPUs split into logical ones, where NCCL is not available.
    "There are non-GPU devices in `tf.distribute.Strategy`, not using nccl allreduce.",
    "NCCL is not supported when using virtual GPUs, falling back to reduction to one device",
    "`FeatureConnector.dtype` is deprecated.",  # TFDS 4.9 itself, when it decodes only some of the features
)
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu", "/dev/kfd")


def quiet_startup(verbose: bool | None = None) -> None:
    """Keeps TensorFlow's start-up messages off the terminal. Call it before TensorFlow is imported.

    May be called again, for example once flags are parsed: with `verbose=True` the Python warnings come back
    (what C++ code prints is decided when TensorFlow is loaded). Variables that the user has set are left alone.

    Args:
      verbose: Whether to leave everything as it is. None: yes if `TFPAR_VERBOSE` is set to a value other than 0,
        or the command line has `--tensorflow_log`.
    """
    if verbose is None:
        verbose = os.environ.get("TFPAR_VERBOSE", "0") not in ("", "0")
        verbose = verbose or any(argument in ("--tensorflow_log", "--tensorflow_log=true") for argument in sys.argv[1:])
    for logger in (logging.getLogger("tensorflow"), absl.logging.get_absl_logger()):
        (logger.removeFilter if verbose else logger.addFilter)(_hide_harmless)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _QuietImport)]
    if not verbose and "tensorflow" not in sys.modules:
        # 2 hides C++ warnings. 3 hides errors too: without a GPU, the one at start is that there is no CUDA driver.
        # What TensorFlow 2.21 logs as an error and has consequences also reaches Python as an exception.
        has_gpu = any(glob.glob(pattern) for pattern in _GPU_FILES)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if has_gpu else "3")
        loading = {"tensorflow": _loading_tensorflow, "keras": _loading_keras}
        sys.meta_path[:0] = [_QuietImport(name, context) for name, context in loading.items()]


@contextlib.contextmanager
def filtered_stderr(chatter: re.Pattern[str] = _IMPORT_CHATTER) -> Iterator[None]:
    """Captures the process's standard error, including that of C++ code; writes the relevant lines at the end.

    If native code ends the process meanwhile, as TensorFlow does on a CPU without AVX, all lines are written. Where
    that cannot be ensured, nothing is captured.

    Args:
      chatter: Lines that match from their beginning are dropped; all others are written when the context ends.
    """
    try:
        sys.stderr.flush()
        terminal = os.dup(2)
    except (AttributeError, OSError, ValueError):  # a process without standard error
        yield
        return
    holder = _hold(terminal)
    if holder is None:
        os.close(terminal)
        yield
        return
    held, shell = holder
    os.dup2(held, 2)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        shell.communicate(b"\n")
        with open(held, "rb") as file:
            file.seek(0)
            for line in file:
                if not chatter.match(line.decode(errors="replace")):
                    os.write(2, line)


def _hold(terminal: int) -> tuple[int, subprocess.Popen[bytes]] | None:
    """A file in memory, and a shell that writes it to a terminal if this process ends before it sends the shell a line.

    None if there is no memory file or shell, or if this is the first process of a container, with which others end.
    """
    if os.getpid() == 1:
        return None
    try:
        held = os.memfd_create("standard error")
    except (AttributeError, OSError):
        return None
    try:
        script = 'read -r _ || exec cat "/proc/self/fd/$0" >&2'
        shell = subprocess.Popen(
            ["/bin/sh", "-c", script, str(held)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=terminal,
            pass_fds=[held],
        )
    except OSError:
        os.close(held)
        return None
    return held, shell


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector, which takes a fifth of TensorFlow's import time and finds nothing.

    In processes of the launcher, which run nothing but one training script, the 300,000 objects that were made are
    exempt from later collections as well.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if "TFPAR_RESTARTS" in os.environ:
            gc.freeze()
        if enabled:
            gc.enable()


def _hide_harmless(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_HARMLESS)


class _QuietImport(FirstImport):
    """Wraps the first import of a package.

    Args:
      name: Of the package.
      loading: What makes the context of the import.
    """

    def __init__(self, name: str, loading: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__(name)
        self._loading = loading

    def execute(self, load: Callable[[Any], object], module: Any) -> None:
        """Imports the package within the context."""
        with self._loading():
            load(module)


@contextlib.contextmanager
def _loading_tensorflow() -> Iterator[None]:
    with filtered_stderr(), _collector_paused(), activity("loading TensorFlow", in_logs=False):
        yield


def _loading_keras() -> contextlib.AbstractContextManager[None]:
    """Keras loads TensorFlow first, whose line is shown meanwhile, and scikit-learn and Matplotlib where there are."""
    return activity("loading Keras", in_logs=False)

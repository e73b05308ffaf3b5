"""No process outlives the launcher, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Reads the numbers of process groups (negative: ended); once the launcher is gone, kills those still there.
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    group = int(line)
    groups.add(group) if group > 0 else groups.discard(-group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """A process that ends every process group if the launcher dies without doing so."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C or a closed terminal must not take the guard away first.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        self._pipe = self._popen.stdin.fileno()

    def join(self) -> Callable[[], None]:
        """Runs in a new process between fork and exec: it registers itself, so that no process is missed."""
        parent, pipe = os.getpid(), self._pipe
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

        def prepare() -> None:
            os.write(pipe, b"%d\n" % os.getpid())
            if prctl is not None:  # should the guard be gone too, the kernel ends at least this process
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        return prepare

    def release(self, group: int) -> None:
        """The group has ended; the system may give its number to others."""
        with contextlib.suppress(OSError):
            os.write(self._pipe, b"-%d\n" % group)

    def close(self) -> None:
        """Ends the guard, which by now has nothing to guard."""
        self._popen.communicate()

"""Permissions that bind root, too, as whom tests often run: Linux asks the capabilities of the thread."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_READS_AND_WRITES_ALL = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextlib.contextmanager
def binding() -> Iterator[None]:
    """Within it, this thread and those that it starts may do with a file what its permission bits say."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    sets[0].effective = before & ~_READS_AND_WRITES_ALL
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0


@contextlib.contextmanager
def of(path, mode: int) -> Iterator[None]:
    """Within it, a file or directory has these permission bits, which bind root, too."""
    before = path.stat().st_mode & 0o7777
    path.chmod(mode)
    try:
        with binding():
            yield
    finally:
        path.chmod(before)

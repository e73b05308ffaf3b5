"""A tiny file system of its own, for what happens when a disk is full or read-only."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def mounted(path: pathlib.Path, kilobytes: int) -> Iterator[pathlib.Path]:
    """A tmpfs of this size at `path`; skips the test where mounting is not permitted."""
    path.mkdir()
    done = _run("mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path))
    if done.returncode:
        pytest.skip(f"a tiny file system cannot be mounted here (that takes root): {done.stderr.strip()}")
    try:
        yield path
    finally:
        while _run("mountpoint", "-q", str(path)).returncode == 0:
            assert _run("umount", "--lazy", str(path)).returncode == 0


def fill(path: pathlib.Path) -> pathlib.Path:
    """Fills a file system to its last byte; returns the file that does, to be removed."""
    filler = path / "filler"
    for size in (1 << 16, 1 << 12, 1):
        with contextlib.suppress(OSError), open(filler, "ab", buffering=0) as file:
            while True:
                file.write(b"x" * size)
    return filler


def make_read_only(path: pathlib.Path) -> None:
    """Lets nobody open anything under `path` for writing; what is open stays so. `mounted` undoes it."""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return
    for options in (("--bind", str(path), str(path)), ("-o", "remount,bind,ro", str(path))):
        done = _run("mount", *options)
        assert done.returncode == 0, done.stderr

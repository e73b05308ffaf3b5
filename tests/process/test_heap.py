"""The heaps of the C library, counted in processes of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

from tfpar.process.cores import cores

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# Threads that live at the same time take memory; `malloc_info` lists the heaps of the process.
SCRIPT = """
import ctypes, sys, tempfile, threading
from tfpar.process.cores import cores
from tfpar.process.heap import share_heaps
print(share_heaps() if sys.argv[1] == "shared" else None)
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
number = 64 + 2 * cores()
together = threading.Barrier(number)

def take():
    together.wait()
    libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=take) for _ in range(number)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with tempfile.NamedTemporaryFile() as file:
    opened = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, opened)
    libc.fclose(opened)
    print(file.read().count(b"<heap nr="))
"""


def heaps(way: str, **environment: str) -> list[str]:
    others = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", SCRIPT, way]
    return subprocess.check_output(command, env={**others, **environment}, text=True, timeout=60).split()


def test_there_are_no_more_heaps_than_cores():
    result, number = heaps("shared")
    assert result == "True"
    assert int(number) <= cores()
    assert int(heaps("plain")[1]) > int(number)


KEPT = """
import ctypes, sys
from tfpar.process.heap import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "kept" else None)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size = 16 << 20
taken = [libc.malloc(ctypes.c_size_t(size)) for _ in range(4)]
for each in taken:
    ctypes.memset(each, 1, size)
for each in reversed(taken):
    libc.free(each)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS:")))
"""


def left(way: str, **environment: str) -> tuple[str, int]:
    """Whether freed memory is kept, and the KiB of a process that has taken and freed 64 MiB."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", KEPT, way]
    kept, number = subprocess.check_output(command, env={**others, **environment}, text=True, timeout=60).split()
    return kept, int(number)


def test_freed_memory_is_kept():
    kept, number = left("kept")
    assert kept == "True"
    assert number > left("plain")[1] + 48 * 1024
    for variable in ("MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"):
        assert left("kept", **{variable: "100000"})[0] == "False"


def test_what_the_environment_says_stays():
    assert heaps("shared", MALLOC_ARENA_MAX="5") == ["False", "5"]

"""What a process returns of the memory that it has freed."""

from __future__ import annotations

import platform
import subprocess
import sys

from tfpar.process import memory

import pytest

pytestmark = pytest.mark.without_keras

# Buffers with small objects after them are freed, which stay: only the pages between can be returned.
GROWS = """
import ctypes
from tfpar.process.memory import RegularReturns

def resident():
    with open("/proc/self/statm") as file:
        return 4096 * int(file.read().split()[1])

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
library.mallopt(-3, 32 << 20)  # large buffers on the heap, too, as after the first of them has been freed
returns = RegularReturns()
buffers = []
for _ in range(32):
    buffers.append(library.malloc(4 << 20))
    ctypes.memset(buffers[-1], 1, 4 << 20)
    while library.malloc(4096) < buffers[-1]:  # in a gap that the imports have left
        pass
for buffer in buffers:
    library.free(buffer)
before = resident()
returns.before_copies()
print(before - resident())
"""


class Clock:
    """Seconds, which pass only as a test says."""

    def __init__(self) -> None:
        self.now, self.returns = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def return_freed_memory(self) -> None:
        self.now, self.returns = self.now + 0.1, self.returns + 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(memory, "time", clock)
    monkeypatch.setattr(memory, "return_freed_memory", clock.return_freed_memory)
    return clock


def test_the_cache_of_files_is_available(tmp_path, monkeypatch):
    """Of a container, which counts it as used. It is less than this machine has."""
    total = memory.main_memory()[1]
    files = {"memory.max": 1 << 20, "memory.current": 1000 << 10}
    for name, value in files.items():
        (tmp_path / name).write_text(f"{value}\n")
    (tmp_path / "memory.stat").write_text(f"anon {600 << 10}\ninactive_file {300 << 10}\nactive_file {100 << 10}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.main_memory() == ((1024 - 1000 + 400) << 10, 1 << 20)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.main_memory()[1] == total


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_gaps_between_what_stays_are_returned():
    done = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100 << 20


@pytest.mark.parametrize(("seconds_per_step", "most"), [(0.01, 0.01), (1.0, 0.01), (20.0, 0.005)])
def test_returns_after_steps_take_a_hundredth_of_the_time(clock, seconds_per_step, most):
    returns = memory.RegularReturns()
    while clock.now < 1000:
        clock.now += seconds_per_step
        returns.after_steps()
    assert 0.8 * most * 1000 < 0.1 * clock.returns < 1.02 * most * 1000 + 0.1


def test_before_copies_memory_is_always_returned(clock):
    returns = memory.RegularReturns()
    for _ in range(3):
        returns.before_copies()
    assert clock.returns == 3
    returns.after_steps()
    assert clock.returns == 3

"""The heaps of the C library, counted in processes of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from tests import nursery
from tfpar.process.cores import cores
from tfpar.process.heap import huge_pages

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


def without_sizes(**environment: str) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    return {**others, **environment}


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
    command = [sys.executable, "-c", KEPT, way]
    kept, number = subprocess.check_output(command, env=without_sizes(**environment), text=True, timeout=60).split()
    return kept, int(number)


def test_freed_memory_is_kept():
    kept, number = left("kept")
    assert kept == "True"
    assert number > left("plain")[1] + 48 * 1024
    for variable in ("MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"):
        assert left("kept", **{variable: "100000"})[0] == "False"


def test_what_the_environment_says_stays():
    assert heaps("shared", MALLOC_ARENA_MAX="5") == ["False", "5"]


# The word before a block has a bit that says whether it was mapped.
BLOCKS = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def is_mapped(size):
    address = libc.malloc(ctypes.c_size_t(size)) - ctypes.sizeof(ctypes.c_size_t)
    return bool(ctypes.c_size_t.from_address(address).value & 2)
"""
# The option is as TensorFlow sets it with a GeneratorDataset.
MAPPED = f"""{BLOCKS}
from tfpar.process.heap import keep_tensors_on_heaps
libc.mallopt(-3, 128 << 10)
print(is_mapped(16 << 20), keep_tensors_on_heaps(), is_mapped(16 << 20), is_mapped(48 << 20))
"""
TRAINS = f"""{BLOCKS}
import keras, tfpar
import numpy as np, tensorflow as tf

def examples():
    while True:
        yield np.ones([4], np.float32), np.ones([1], np.float32)

signature = (tf.TensorSpec([4]), tf.TensorSpec([1]))
dataset = tf.data.Dataset.from_generator(examples, output_signature=signature)
found = []
trainer = tfpar.Trainer(
    lambda: keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]),
    loss="mse", global_batch_size=4, steps=2, verbose=0,
)
trainer.fit(dataset, hooks=[tfpar.Hook(1, lambda state: found.append(is_mapped(1 << 20)))])
print(*found)
"""


def mapped(**environment: str) -> list[str]:
    command = [sys.executable, "-c", MAPPED]
    return subprocess.check_output(command, env=without_sizes(**environment), text=True, timeout=60).split()


# A block as large as that of an XLA program, which is mapped.
ZEROED = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size = 64 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
ctypes.memset(libc.malloc(ctypes.c_size_t(size)), 1, size)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def gives_huge_pages() -> bool:
    """Whether the C library can ask for huge pages, and the system gives them to those who ask alone."""
    version = tuple(int(part) for part in platform.libc_ver()[1].split(".")[:2])
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return version >= (2, 35) and mode.exists() and "[madvise]" in mode.read_text()


@pytest.mark.skipif(not gives_huge_pages(), reason="huge pages are given to all or to none")
def test_a_large_block_is_zeroed_in_huge_pages():
    def pages(environ: dict[str, str]) -> int:
        return int(subprocess.check_output([sys.executable, "-c", ZEROED], env=environ, text=True, timeout=60))

    assert pages(without_sizes()) > 16_000
    assert pages(without_sizes(**huge_pages({}))) < 4_000  # 32, where none of them is missing


def test_tensors_are_on_heaps_again():
    assert mapped() == ["True", "True", "False", "True"]
    assert mapped(MALLOC_MMAP_THRESHOLD_="200000") == ["True", "False", "True", "True"]


def test_training_keeps_tensors_on_heaps_whatever_the_dataset():
    done = nursery.run([sys.executable, "-c", TRAINS], env=without_sizes(), capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-2:] == ["False", "False"], done.stderr

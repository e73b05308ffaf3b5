"""The C library's heaps, and the allocator that TensorFlow has above them on CPUs.

glibc gives threads up to eight heaps per core (`M_ARENA_MAX`, malloc(3)), and each heap keeps what its threads have
freed, where the others cannot use it. TensorFlow's threads take and free the same sizes in turn, so a worker's peak
contains most of them several times.

With oneDNN, TensorFlow (2.21, `MklCPUAllocator`) takes memory for larger tensors in regions of up to hundreds of MiB,
and never returns it. Without, and for what XLA computes with, tensors are the C library's.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping

from tfpar.process.cores import cores

# M_ARENA_MAX and so on in glibc's malloc.h
_ARENA_MAX, _MMAP_THRESHOLD, _TOP_PAD, _TRIM_THRESHOLD = -8, -3, -2, -1
_SYSTEM_ALLOCATOR = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_KEPT_BYTES, _LARGEST_BYTES = 256 << 20, 32 << 20


def share_heaps() -> bool:
    """Limits the number of heaps to that of the cores, for threads that start later; returns whether it has.

    Nothing changes with other C libraries, or if the environment sets a number (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`).
    """
    return _set(_ARENA_MAX, cores(), "MALLOC_ARENA_MAX")


def keep_freed_memory() -> bool:
    """Lets heaps keep what is free at their end, the first one up to 256 MiB; returns whether they do.

    Tensors of up to 32 MiB, the most that glibc allows, are then on heaps. By default a heap returns memory at its end
    to the system, and takes it back, zeroed, for the next tensor. With several replicas in a process, that took up to
    half of a step.

    Nothing changes with other C libraries, or if the environment sets a size (`MALLOC_TOP_PAD_`,
    `MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`).
    """
    if _is_given("MALLOC_TRIM_THRESHOLD_") or not _set(_TOP_PAD, _KEPT_BYTES, "MALLOC_TOP_PAD_"):
        return False
    keep_tensors_on_heaps()  # the first option stops what adapts the sizes of the second
    return True


def keep_tensors_on_heaps() -> bool:
    """Lets tensors of up to 32 MiB be on heaps, whose memory serves the next tensors; returns whether they are.

    glibc takes larger blocks from the system, zeroed page by page, and returns them when they are freed. What is larger
    begins at 128 KiB, and adapts to what a program frees, up to 32 MiB. TensorFlow (2.21, `ApplyPython311MemoryPatch`)
    sets it to 128 KiB for good whenever it makes a GeneratorDataset, which `Dataset.from_generator` has, and the
    iterators for several devices of a process. Call this after that, and again where TensorFlow may make another.

    Nothing changes with other C libraries, or if the environment sets a size (`MALLOC_MMAP_THRESHOLD_`,
    `GLIBC_TUNABLES`).
    """
    _set(_TRIM_THRESHOLD, 2 * _LARGEST_BYTES, "MALLOC_TRIM_THRESHOLD_")  # glibc adapts both to each other in this way
    return _set(_MMAP_THRESHOLD, _LARGEST_BYTES, "MALLOC_MMAP_THRESHOLD_")


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable with which the C library of a process asks for huge pages, which the system zeroes all at once.

    A program of XLA takes the memory that it computes in from TensorFlow's allocator. Where that is the C library, a
    block of more than 32 MiB is mapped for each step, and zeroed in pages of 4 KiB, which may take a third of a step.

    glibc (2.35 and later, `glibc.malloc.hugetlb` in its manual) reads the option when a process starts, and asks only
    where the system gives huge pages to those who ask (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled).

    Args:
      environ: The environment that the process has otherwise, whose other options stay, and this one if it is there.
    """
    given = environ.get(_TUNABLES, "")
    wanted = "" if _HUGE_PAGES in given else f"{_HUGE_PAGES}=1"
    return {_TUNABLES: ":".join(filter(None, (given, wanted)))}


def return_freed_tensors() -> None:
    """Lets TensorFlow return memory of tensors on CPUs to the C library, instead of keeping it for its next tensors.

    What a process has at most is then what it needs at one time. TensorFlow's own allocator also has the gaps between
    large tensors, and what other phases than training take, such as writing checkpoints, comes on top of its peak. It
    does not count tensors any more (`tf.config.experimental.get_memory_info`).

    Call it before the first tensor. Nothing changes if the environment chooses (`TF_ONEDNN_USE_SYSTEM_ALLOCATOR`).
    """
    os.environ.setdefault(_SYSTEM_ALLOCATOR, "1")


def returns_freed_tensors() -> bool:
    """Whether memory of freed tensors is the C library's, which can return it to the system."""
    return os.environ.get(_SYSTEM_ALLOCATOR) == "1"


def _set(option: int, value: int, variable: str) -> bool:
    if _is_given(variable) or not _is_glibc():
        return False
    return bool(ctypes.CDLL(None).mallopt(option, value))


@functools.cache
def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def _is_given(variable: str) -> bool:
    """Whether the environment sets an option, by its variable or by its name among glibc's tunables."""
    tunable = variable.removeprefix("MALLOC_").strip("_").lower()
    return variable in os.environ or tunable in os.environ.get(_TUNABLES, "")

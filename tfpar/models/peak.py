"""Peak arithmetic rate of the local device, the denominator of model FLOPs utilisation (MFU).

MFU (Chowdhery et al. 2022, appendix B) is the model's FLOPs per second, without recomputation, over the peak.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time

from tfpar.config import PRECISIONS, unknown_name
from tfpar.process.cores import cores, cores_of_host

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class PeakFlops:
    """A peak rate and its origin.

    Attributes:
      flops: Floating point operations per second; a multiply-add counts as two.
      source: Device, number format and origin, e.g. "NVIDIA H100 PCIe, bfloat16, data sheet".
      threads: Number of threads of this process in the measurement; its logical devices may share them with each
        other and, if the host has too few cores, with other processes. 0 for an accelerator.
    """

    flops: float
    source: str
    threads: int = 0

    def of_replica(self, replicas: int) -> float:
        """Returns the peak rate of one replica, in FLOPs per second.

        Args:
          replicas: Replicas of all processes on this host, each with as many threads. An accelerator has one.
        """
        if not self.threads:
            return self.flops
        return self.flops * min(1.0, cores_of_host() / (self.threads * replicas))


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """Dense peak rates in TFLOP/s, without structured sparsity, from the vendor's data sheets; 0: not supported."""

    float32: float
    tf32: float
    float16: float
    bfloat16: float


def _ampere(float32: float, tf32: float, half: float) -> _Gpu:
    """Returns the rates of a GPU of the Ampere generation or later, where bfloat16 runs as fast as float16."""
    return _Gpu(float32, tf32, half, half)


# Words that must all occur in the device name that TensorFlow reports; the first match counts.
_GPUS: tuple[tuple[tuple[str, ...], _Gpu], ...] = (
    (("GB200",), _ampere(80.0, 1250.0, 2500.0)),
    (("B200",), _ampere(80.0, 1125.0, 2250.0)),
    (("B100",), _ampere(60.0, 875.0, 1750.0)),
    (("GH200",), _ampere(67.0, 494.7, 989.4)),
    (("H200", "NVL"), _ampere(60.0, 417.5, 835.5)),
    (("H200",), _ampere(67.0, 494.7, 989.4)),
    (("H100", "NVL"), _ampere(60.0, 417.5, 835.5)),
    (("H100", "PCIe"), _ampere(51.0, 378.0, 756.0)),
    (("H100",), _ampere(67.0, 494.7, 989.4)),
    (("A100",), _ampere(19.5, 156.0, 312.0)),
    (("A40",), _ampere(37.4, 74.8, 149.7)),
    (("A30",), _ampere(10.3, 82.0, 165.0)),
    (("A10G",), _ampere(31.5, 35.0, 70.0)),
    (("A10",), _ampere(31.2, 62.5, 125.0)),
    (("L40S",), _ampere(91.6, 183.0, 362.1)),
    (("L40",), _ampere(90.5, 90.5, 181.0)),
    (("L4",), _ampere(30.3, 60.0, 121.0)),
    (("RTX", "6000", "Ada"), _ampere(91.1, 182.1, 364.2)),
    (("RTX", "A6000"), _ampere(38.7, 77.4, 154.8)),
    (("RTX", "4090"), _ampere(82.6, 82.6, 165.2)),
    (("RTX", "3090"), _ampere(35.6, 35.6, 71.0)),
    (("V100", "PCIE"), _Gpu(14.0, 0.0, 112.0, 0.0)),
    (("V100",), _Gpu(15.7, 0.0, 125.0, 0.0)),
    (("T4",), _Gpu(8.1, 0.0, 65.0, 0.0)),
    (("P100", "PCIE"), _Gpu(9.3, 0.0, 18.7, 0.0)),
    (("P100",), _Gpu(10.6, 0.0, 21.2, 0.0)),
)

_MIG_SLICE = re.compile(r"\bMIG \d+g\.")  # as in "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
_MEASURING_SECONDS = 0.2
_PRODUCTS = 12


def peak_flops(precision: str) -> PeakFlops:
    """Returns the peak rate of the first visible accelerator, or of the CPU threads of this process.

    A table of data sheet figures (dense, no sparsity) gives the rates of NVIDIA GPUs. Any other device is measured, in
    at most 0.3 s and once per process, with a matrix product, and `source` says so: a measured figure is the rate that
    the library reaches, so the MFU against it is higher than the MFU against a data sheet.

    Args:
      precision: One of `tfpar.config.PRECISIONS`. float32 means TensorFloat-32 if the GPU supports it and
        TensorFlow may use it.

    Raises:
      ConfigError: The precision is unknown.
    """
    if precision not in PRECISIONS:
        raise unknown_name("--precision", precision, PRECISIONS)
    dtype = precision.removeprefix("mixed_")
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        threads = _threads()
        return _measure("/CPU:0", f"CPU, {threads} thread{'s' * (threads > 1)}", "float32", threads)
    name = str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return lookup_gpu(name, dtype, tf32) or _measure("/GPU:0", name, dtype, threads=0)


def _threads() -> int:
    """Returns how many threads an operation on one CPU device of this process can use."""
    configured = tf.config.threading.get_intra_op_parallelism_threads() or os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    try:
        return min(int(configured), cores()) or cores()  # 0 means all cores in TensorFlow
    except ValueError:
        return cores()


def lookup_gpu(name: str, dtype: str, tf32: bool) -> PeakFlops | None:
    """Returns the data sheet's figure for a GPU.

    Args:
      name: The name that TensorFlow reports, e.g. "NVIDIA A100-SXM4-80GB".
      dtype: "float32", "float16" or "bfloat16".
      tf32: Whether float32 products may use TensorFloat-32.

    Returns:
      The peak of one device, or None if the GPU is not in the table, or is a MIG slice, a part of one.
    """
    if _MIG_SLICE.search(name):
        return None
    for words, gpu in _GPUS:
        if all(re.search(rf"\b{word}\b", name, re.IGNORECASE) for word in words):
            rates = {"float32": gpu.float32, "float16": gpu.float16, "bfloat16": gpu.bfloat16}
            if dtype == "float32" and tf32 and gpu.tf32:
                return PeakFlops(gpu.tf32 * 1e12, f"{name}, TF32, data sheet")
            if not rates[dtype]:
                # TensorFlow computes in float32 if the GPU does not support the dtype.
                return PeakFlops(gpu.float32 * 1e12, f"{name}, float32 in place of {dtype}, data sheet")
            return PeakFlops(rates[dtype] * 1e12, f"{name}, {dtype}, data sheet")
    return None


@functools.cache  # a program may train many times
def _measure(device: str, name: str, dtype: str, threads: int) -> PeakFlops:
    """Measures the best rate of a square matrix product within the time limit."""
    size = 768 if device.startswith("/CPU") else 4096
    with tf.device(device):
        a = tf.ones((size, size), dtype)
        best = float("inf")
        deadline = time.perf_counter() + _MEASURING_SECONDS
        for number in range(_PRODUCTS):
            start = time.perf_counter()
            if number > 1 and start > deadline:
                break
            # Fetching one element makes the clock stop when the device has finished.
            tf.matmul(a, a)[0, 0].numpy()
            if number:  # the first product includes the setup of the library
                best = min(best, time.perf_counter() - start)
    return PeakFlops(2 * size**3 / best, f"{name}, {dtype}, measured by a {size}x{size} matrix product", threads)

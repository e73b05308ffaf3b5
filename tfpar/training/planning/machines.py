"""Properties of devices and links: measured, read from the system, or assumed if neither is possible."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

from tfpar.collectives import gloo
from tfpar.collectives.cost_model import Link
from tfpar.models.peak import peak_flops
from tfpar.parallel.planner.machine import Machine
from tfpar.process.cores import cores, cores_of_host
from tfpar.training.planning.measuring import Measured

# The share of a GPU's data-sheet rate that training steps of large models reach.
_REACHED = 0.4
_NVLINK, _GPU_MESSAGE_S, _GPU_MEMORY_BANDWIDTH = 100e9, 2e-5, 1e12
# The largest bandwidth of TensorFlow's collectives over gRPC on any link, and their latency.
_GRPC_BANDWIDTH, _GRPC_LATENCY_S = 4e8, 1e-3
# The same of the native transport over Gloo.
_GLOO_BANDWIDTH, _GLOO_LATENCY_S = 1.5e9, 2e-4


def device_memory(device_type: str, devices_here: int) -> int:
    """Bytes of memory of a device of this machine; 0 if they cannot be determined.

    Args:
      device_type: `CPU` or `GPU`.
      devices_here: Devices that share this machine's memory, if they are CPUs.
    """
    if device_type == "GPU":
        return _gpu_memory()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with contextlib.suppress(OSError, ValueError):  # "max" where a container has no limit
            total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        return total // devices_here
    return 0


def _gpu_memory() -> int:
    """Bytes of the smallest GPU, from nvidia-smi: TensorFlow 2.21 reports it only once a device is in use."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in text.split()) << 20
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """The user's values for a machine; values of 0 and None are to be determined.

    Attributes:
      flops: FLOPs per second of a device.
      memory: Bytes of a device.
      within: The link between the devices of a worker.
      between: The link between the workers.
    """

    flops: float = 0.0
    memory: int = 0
    within: Link | None = None
    between: Link | None = None


def machine_of(
    workers: int,
    devices: int,
    device_type: str,
    *,
    precision: str,
    measured: Measured | None,
    given: Given,
    workers_here: int = 1,
) -> Machine:
    """A machine, from the user's values and from measurements on a CPU, or the data sheet of a GPU.

    Args:
      workers: Number of workers.
      devices: Devices of each.
      device_type: `CPU` or `GPU`.
      precision: As `--precision`.
      measured: Measured on this machine, with all threads of a worker. None, for a CPU: times are not needed.
      given: The user's values.
      workers_here: Workers that share this machine.
    """
    gpu = device_type == "GPU"
    defaults = Machine()
    if given.flops:
        rates: dict[str, Any] = {"flops": given.flops}
    elif gpu:
        rates = {"flops": _REACHED * peak_flops(precision).flops}
    else:
        rates = _of_cpu(measured, devices * workers_here, _share(workers_here)) if measured else {}
    return Machine(
        workers=workers,
        devices=devices,
        **rates,
        memory=given.memory or device_memory(device_type, devices * workers_here),
        memory_bandwidth=_GPU_MEMORY_BANDWIDTH if gpu else defaults.memory_bandwidth,
        within=given.within or (Link(_GPU_MESSAGE_S, _NVLINK) if gpu else defaults.within),
        between=given.between or defaults.between,
        fused=(measured.fused if measured else {}) or defaults.fused,
        fused_in_stages=(measured.fused_in_stages if measured else 0.0) or defaults.fused_in_stages,
        fleeting=(measured.fleeting if measured else {}) or defaults.fleeting,
        shares_memory=not gpu,
    )


def _of_cpu(measured: Measured, sharing: int, share: float) -> dict[str, Any]:
    """The rates of a worker's CPU, as arguments of `Machine`.

    Args:
      measured: As of `machine_of`.
      sharing: Devices that share the cores of the machine.
      share: The share of the rates that a worker reaches while the others on its machine are busy.
    """
    return {
        "flops": share * measured.flops,
        "worker_flops": share * measured.flops,
        "measured_rates": measured.rates.with_memory_shared(share),
        "cores": cores_of_host(),
        "sharing": sharing,
    }


def between_cpus(transport: str, given: Link | None = None) -> Link:
    """The link between CPUs of workers as a transport, `gloo` or `tensorflow`, can use it.

    Args:
      transport: The transport.
      given: The link that it runs over; by default what is assumed between workers.
    """
    link = given or Machine().between
    if transport == "gloo":
        latency = _GLOO_LATENCY_S + (given.latency if given else 0.0)
        return Link(latency, 1 / (1 / link.bandwidth + 1 / _GLOO_BANDWIDTH), chunk_bytes=gloo.CHUNK_BYTES)
    return Link(link.latency + _GRPC_LATENCY_S, 1 / (1 / link.bandwidth + 1 / _GRPC_BANDWIDTH))


def _share(workers_here: int) -> float:
    """The share of its rate that a worker reaches while the others on this machine are busy too."""
    return min(1.0, cores_of_host() / (threads() * workers_here))


def threads() -> int:
    """Threads with which a worker computes."""
    return int(os.environ.get("TF_NUM_INTRAOP_THREADS") or 0) or cores()

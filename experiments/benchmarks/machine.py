"""The line that every measurement carries: on what, with what, when."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform

import keras
import tensorflow as tf


def describe_machine() -> str:
    """CPU or GPU, cores, versions and date, in one line."""
    name = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    devices = ", ".join(gpus) if gpus else f"{name}, {os.cpu_count()} cores"
    return f"{devices}; TensorFlow {tf.__version__}, Keras {keras.__version__}; {datetime.date.today().isoformat()}"

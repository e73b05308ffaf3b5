"""`tests.integration.scripts.divided` on a GPU that is split into two logical devices: tests/gpu/test_gpu.py."""

from __future__ import annotations

import sys

from tests.integration.scripts import divided

import tensorflow as tf

MEBIBYTES = 4096

if __name__ == "__main__":
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=MEBIBYTES) for _ in range(2)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[0], parts)
    divided.main(*sys.argv[1:])

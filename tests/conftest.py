"""Shared test set-up: quiet start-up and four logical CPU devices, before TensorFlow initialises."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# The tests must not see a real GPU: layouts are made of logical CPU devices everywhere.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.pop("TF_CONFIG", None)

import keras
import pytest
import tensorflow as tf

LOGICAL_CPUS = 4


def pytest_configure() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(LOGICAL_CPUS)]
    )


@pytest.fixture(autouse=True)
def _sigterm_as_before():
    """`tfpar.check` makes SIGTERM a preemption for the rest of a program."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _fresh_keras_state():
    """Names, seeds and dtype policy of one test must not depend on the tests before it."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")

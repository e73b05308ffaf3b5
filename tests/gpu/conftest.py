"""Tests that need a GPU and a TensorFlow that can use it; without, they are skipped.

`make gpu-test` runs them. This process sees no GPU (tests/conftest.py) and computes what is expected on the CPU; the
programs that it starts see the first one, which two workers share.
"""

from __future__ import annotations

import glob
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
VISIBLE = os.environ.get("TFPAR_TEST_GPU", "0")


def environ() -> dict[str, str]:
    """The environment of programs that see the GPU."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")}
    return {**kept, "CUDA_VISIBLE_DEVICES": VISIBLE, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def why_not() -> str:
    """Why TensorFlow cannot use a GPU here; empty if it can."""
    if not glob.glob("/dev/nvidia[0-9]*"):
        return "this machine has no NVIDIA GPU"
    code = "import tensorflow as tf; print(len(tf.config.list_logical_devices('GPU')))"
    found = subprocess.run([sys.executable, "-c", code], env=environ(), capture_output=True, text=True, check=False)
    return "" if found.stdout.strip() not in ("", "0") else f"TensorFlow sees no GPU: {found.stderr[-1000:]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if HERE in item.path.parents]
    if own and (reason := why_not()):
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))

"""What a run sets up for the memory of its process, in processes of their own."""

from __future__ import annotations

import json
import os
import sys

from tests import nursery

import pytest

SCRIPT = """
import json, sys
import tensorflow as tf
import tfpar
options = {"devices": 2, "global_batch_size": 4, "steps": 1, "verbose": 0, **json.loads(sys.argv[1])}
tfpar.initialize(tfpar.ExperimentConfig.from_flat_dict(options))
with tf.device("CPU:0"):
    kept = tf.zeros([1000, 1000])
print(tf.config.experimental.get_memory_info("CPU:0")["current"])
"""
ALLOCATOR = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
MATRIX = 4_000_000


def counted(tmp_path, options: dict, **environment: str) -> int:
    """The bytes of tensors that TensorFlow's own allocator has given out to a process with a matrix."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name != ALLOCATOR} | environment
    command = [sys.executable, str(script), json.dumps(options)]
    return int(nursery.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True).stdout)


@pytest.mark.parametrize("options", [{"mesh": "model:2"}, {"mesh": "pipeline:2"}, {"shard": "weights"}], ids=str)
def test_divided_models_return_tensors_to_the_system(tmp_path, options):
    assert counted(tmp_path, options) == 0


def test_other_models_and_the_environment_keep_the_allocator(tmp_path):
    assert counted(tmp_path, {}) >= MATRIX
    assert counted(tmp_path, {"mesh": "model:2"}, **{ALLOCATOR: "0"}) >= MATRIX

"""What a run sets up for the memory of its process, in processes of their own."""

from __future__ import annotations

import json

from tests.own_process import ALLOCATOR, printed

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
TRAINING = """
import keras
import tfpar
options = {"devices": 2, "mesh": "model:2", "global_batch_size": 32, "steps": 3, "jit_compile": "false", "verbose": 0}
source = tfpar.inputs.build_source(tfpar.ExperimentConfig.from_flat_dict({"dataset": "digits"}).input, "train", 0)
trainer = tfpar.Trainer(
    lambda: tfpar.models.build("mlp", tfpar.task_spec(source)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    **options,
)
print(trainer.fit(source)["params_sha256"])
"""
MATRIX = 4_000_000


def counted(tmp_path, options: dict, **environment: str) -> int:
    """The bytes of tensors that TensorFlow's own allocator has given out to a process with a matrix."""
    return int(printed(tmp_path, SCRIPT, json.dumps(options), **environment))


@pytest.mark.parametrize("options", [{"mesh": "model:2"}, {"mesh": "pipeline:2"}, {"shard": "weights"}], ids=str)
def test_divided_models_return_tensors_to_the_system(tmp_path, options):
    assert counted(tmp_path, options) == 0


def test_other_models_and_the_environment_keep_the_allocator(tmp_path):
    assert counted(tmp_path, {}) >= MATRIX
    assert counted(tmp_path, {"mesh": "model:2"}, **{ALLOCATOR: "0"}) >= MATRIX


def test_the_allocator_does_not_change_the_weights(tmp_path):
    weights = printed(tmp_path, TRAINING)
    assert len(weights.strip()) == 64
    assert weights == printed(tmp_path, TRAINING, **{ALLOCATOR: "0"})

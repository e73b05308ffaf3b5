"""What a run sets up for the memory of its process, in processes of their own."""

from __future__ import annotations

import json

from tests.own_process import ALLOCATOR, printed

import pytest

SCRIPT = """
import json, sys
import tensorflow as tf
import tfpar
options = {"global_batch_size": 4, "steps": 1, "verbose": 0, **json.loads(sys.argv[1])}
tfpar.initialize(tfpar.ExperimentConfig.from_flat_dict(options))
with tf.device("CPU:0"):
    kept = tf.zeros([1000, 1000])
print("bytes", tf.config.experimental.get_memory_info("CPU:0")["current"])
"""
TRAINING = """
import keras
import tfpar
options = {"mesh": "model:2", "global_batch_size": 32, "steps": 3, "jit_compile": "false", "verbose": 0}
source = tfpar.inputs.build_source(tfpar.ExperimentConfig.from_flat_dict({"dataset": "digits"}).input, "train", 0)
trainer = tfpar.Trainer(
    lambda: tfpar.models.build("mlp", tfpar.task_spec(source)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    **options,
)
print("weights", trainer.fit(source)["params_sha256"])
"""
MATRIX = 4_000_000
TWO_WORKERS = ("-m", "tfpar.launch", "--workers=2", "--")


def counted(tmp_path, options: dict, *launcher: str, **environment: str) -> list[int]:
    """The bytes of tensors that TensorFlow's own allocator has given out to each process, which has a matrix."""
    lines = printed(tmp_path, SCRIPT, json.dumps(options), launcher=launcher, **environment).splitlines()
    return [int(line.split()[-1]) for line in lines if "bytes" in line]


@pytest.mark.parametrize("options", [{"mesh": "model:2"}, {"mesh": "pipeline:2"}, {"shard": "weights"}], ids=str)
def test_workers_with_divided_models_return_tensors_to_the_system(tmp_path, options):
    assert counted(tmp_path, options, *TWO_WORKERS) == [0, 0]


def test_others_and_the_environment_keep_the_allocator(tmp_path):
    for found in (
        counted(tmp_path, {}, *TWO_WORKERS),
        counted(tmp_path, {"mesh": "model:2"}, *TWO_WORKERS, **{ALLOCATOR: "0"}),
        counted(tmp_path, {"mesh": "model:2", "devices": 2}),  # dividing saves nothing within a process
    ):
        assert found
        assert min(found) >= MATRIX


def test_the_allocator_does_not_change_the_weights(tmp_path):
    def weights(**environment: str) -> set[str]:
        lines = printed(tmp_path, TRAINING, launcher=TWO_WORKERS, **environment).splitlines()
        return {line.split()[-1] for line in lines if "weights" in line}

    [digest] = found = weights()
    assert len(digest) == 64
    assert found == weights(**{ALLOCATOR: "0"})

"""The parameter-server loop beside the synchronous one: the same draws, the same files, hooks and callbacks."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from tests import nursery

import pytest

pytestmark = pytest.mark.cluster
SCRIPT = """
import sys
import tfpar
from tfpar import models
import keras, numpy as np

workdir, strategy, stop_after = sys.argv[1:]
config = tfpar.ExperimentConfig.from_flat_dict({
    "strategy": strategy, "workdir": workdir, "stop_after": int(stop_after), "steps": 12, "global_batch_size": 16,
    "optimizer": "sgd", "learning_rate": 0.1, "schedule": "constant", "seed": 7, "jit_compile": "false",
    "eval_every": 4, "model": "custom", "dataset": "custom",
})
runtime = tfpar.start(config)
generator = np.random.default_rng(0)
x = generator.normal(size=(64, 8)).astype(np.float32)
train = tfpar.inputs.from_arrays(x, (np.abs(x).sum(axis=1) % 3).astype(np.int32), num_classes=3)


class Counter(keras.layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
        return x


def build():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(8), keras.layers.Dropout(0.5)]
    return keras.Sequential([*layers, Counter(name="counter"), keras.layers.Dense(3)], name="net")


logs, seen = [], []
trainer = tfpar.Trainer(
    build, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), config=config, runtime=runtime
)
trainer.fit(
    train,
    validation=train,
    hooks=[tfpar.Hook(3, lambda state: seen.append((state.step, len(state.since.losses))))],
    callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs_: logs.append((epoch, sorted(logs_))))],
)
print("seen", seen, "logs", logs)
print("counted", int(trainer.model.get_layer("counter").steps.numpy()))
"""


def run(tmp_path: pathlib.Path, name: str, strategy: str, stop_after: int = 0) -> tuple[dict, str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / name), strategy, str(stop_after)]
    if strategy == "parameter_server":
        command = [sys.executable, "-m", "tfpar.launch", "--workers=1", "--ps=1", "--", *command[1:]]
    done = nursery.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    summary = tmp_path / name / "summary.json"
    return json.loads(summary.read_text()) if summary.exists() else {}, done.stdout


def test_one_seed_draws_the_same_numbers_under_both_loops(tmp_path):
    """One worker takes its steps in turn, so that asynchronous training has nothing asynchronous but its draws."""
    expected, text = run(tmp_path, "whole", "one_device")
    assert "counted 12" in text
    _, stopped = run(tmp_path, "parts", "parameter_server", stop_after=6)
    assert "stopped after step 6 of 12; the newest checkpoint is of step 6" in stopped
    found, text = run(tmp_path, "parts", "parameter_server")
    assert "resumed from step 6 (epoch 1.50)" in text
    assert "counted 6" in stopped  # integers travel to the servers, too
    assert "counted 12" in text
    assert found["steps"] == expected["steps"] == 12
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    assert found["eval"]["loss"] == pytest.approx(expected["eval"]["loss"], rel=1e-4)
    # Hooks and callbacks see the same steps, and the callbacks the results of evaluations that they wait for.
    assert "seen [(3, 3), (6, 3)] logs [(0, ['loss', 'val_loss'])]" in stopped
    assert "seen [(9, 3), (12, 3)] logs [(1, ['loss', 'val_loss']), (2, ['loss', 'val_loss'])]" in text

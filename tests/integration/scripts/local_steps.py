"""Runs with local steps on real workers: tests/integration/test_local_steps.py.

python -m tests.integration.scripts.local_steps OUTPUT CASES

CASES is JSON: a list of options of an experiment, each of which is trained in turn. Among them, `bad` is the number of
an example that is too large, `slow` the seconds by which a step of worker 1 takes longer, and `pair` whether the model
has layers that a model axis divides; `takes_over` is a step and the `workdir` of an earlier case, whose checkpoint of
this step the case goes on from. `OUTPUT/CASE-WORKER.npz` gets the weights, and at every `look_every` steps what
hooks see: the weights as one vector, `seen`, and the loss of the last evaluation, `losses`. `OUTPUT/CASE-WORKER.json`
is the summary.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import tfpar
from tests.integration.scripts.taken_over import take_over
from tfpar.models import BatchNormalization
from tfpar.parallel.split import whole

import keras
import numpy as np
import tensorflow as tf

EXAMPLES, BATCH, STEPS = 90, 16, 14
COMMON = {
    "global_batch_size": BATCH,
    "uneven_batches": True,
    "optimizer": "sgd",
    "optimizer_args": "momentum=0.0",
    "learning_rate": 0.05,
    "schedule": "cosine",
    "eval_every": 2,
    "steps_per_loop": 3,
    "jit_compile": "false",
    "verbose": 0,
}


class Slow(keras.layers.Layer):
    """Takes its time on worker 1."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if not self.seconds or worker() != 1:
            return inputs
        waited = tf.numpy_function(self._wait, [], tf.float32)
        return inputs + 0.0 * tf.ensure_shape(waited, [])

    def _wait(self) -> np.float32:
        time.sleep(self.seconds)
        return np.float32(0.0)


def worker() -> int:
    return json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)


def build(*, normalizes: bool, saturates: bool, slow: float = 0.0, pair: bool = False) -> keras.Model:
    norm = [BatchNormalization(momentum=0.9, name="norm")] if normalizes else []
    dense = keras.layers.Dense(72, "tanh" if saturates else None, name="first")
    wait = [Slow(slow, name="slow")] if slow else []
    divisible = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(24)] if pair else []  # which a model axis divides
    return keras.Sequential([keras.Input((24,)), *divisible, *wait, dense, *norm, keras.layers.Dense(3, name="last")])


def data(bad: int = -1) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 24)).astype(np.float32)
    y = (x[:, :3].argmax(axis=1)).astype(np.int32)
    if bad >= 0:
        x[bad] = 3e38
    return x, y


def train(options: dict[str, Any], runtime: tfpar.Runtime | None = None) -> tuple[tfpar.Trainer, dict[str, Any]]:
    """Trains the model on the same examples from the same seed; returns the trainer, and what hooks saw."""
    steps, bad, normalizes = (options.pop(name, value) for name, value in (("steps", STEPS), ("bad", -1), ("bn", True)))
    pair = options.pop("pair", False)
    stop, slow, every = options.pop("stop_at", 0), options.pop("slow", 0.0), options.pop("look_every", 2)
    config = tfpar.ExperimentConfig.from_flat_dict({**COMMON, **options})
    if runtime is None:
        runtime = tfpar.initialize(config)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    trainer = tfpar.Trainer(
        lambda: build(normalizes=normalizes, saturates=bad < 0, slow=slow, pair=pair),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
    )
    seen: dict[str, Any] = {"seen": [], "losses": []}

    def look(state: tfpar.LoopState) -> tfpar.LoopState | None:
        seen["seen"].append(np.concatenate([whole(variable).ravel() for variable in trainer.model.variables]))
        seen["losses"].append(state.results["loss"])
        return state.replace(stop=True) if state.step == stop else None

    seen["summary"] = trainer.fit(*data(bad), steps=steps, validation=data(), hooks=[tfpar.Hook(every, look)])
    return trainer, seen


def main(output: str, cases: str) -> None:
    rank = worker()
    runtime = None
    for number, options in enumerate(json.loads(cases)):
        if taken := options.pop("takes_over", None):
            take_over(options["workdir"], *taken, rank)
        trainer, seen = train(options, runtime)
        runtime = trainer.runtime
        arrays = {variable.path: whole(variable) for variable in trainer.model.variables}
        with open(os.path.join(output, f"{number}-{rank}.json"), "w") as file:
            json.dump(seen.pop("summary"), file)
        np.savez(os.path.join(output, f"{number}-{rank}.npz"), **arrays, **seen)


if __name__ == "__main__":
    main(*sys.argv[1:])

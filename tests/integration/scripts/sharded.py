"""Runs with sharded optimizer state on real workers: tests/integration/test_sharded.py.

python -m tests.integration.scripts.sharded OUTPUT CASES

CASES is JSON: a list of options of an experiment, each of which is trained in turn. Among them, `takes_over` is a step
and the `workdir` of an earlier case, whose checkpoint of this step the case goes on from. `OUTPUT/CASE-WORKER.npz` gets
the weights, and the bytes of the optimizer's state on this worker.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tfpar
from tests.integration.scripts.taken_over import take_over
from tfpar.parallel.split import whole

import keras
import numpy as np

EXAMPLES, BATCH, STEPS = 90, 16, 30
COMMON = {
    "global_batch_size": BATCH,
    "uneven_batches": True,
    "learning_rate": 0.01,
    "schedule": "cosine",
    "weight_decay": 0.1,
    "weight_decay_exclude": "bias,norm",
    "clip_norm": 0.5,
    "exchange": "none",
    "verbose": 0,
}


class Spoiled(keras.layers.Layer):
    """Returns its first input; its gradient is NaN, while the loss is finite, for examples with a huge second input."""

    def call(self, inputs: list[Any]) -> Any:
        outputs, x = inputs
        huge = keras.ops.any(keras.ops.abs(x) > 1e6, axis=-1, keepdims=True)
        return outputs + keras.ops.sqrt(keras.ops.where(huge, 0.0 * outputs, 1.0)) - keras.ops.where(huge, 0.0, 1.0)


def build_spoiled() -> keras.Model:
    inputs = keras.Input((12,))
    return keras.Model(inputs, Spoiled(dtype="float32")([build()(inputs), inputs]))


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(72, "tanh", name="first"),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(97, "tanh", name="second"),
            keras.layers.Dense(3, name="last"),
        ]
    )


def data(spoiled: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Examples and labels; `spoiled` is the number of an example of which `Spoiled` has no gradient."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 12)).astype(np.float32)
    y = x[:, :3].argmax(axis=1).astype(np.int32)
    if spoiled is not None:
        x[spoiled] = 1e7
    return x, y


def train(options: dict[str, Any], runtime: tfpar.Runtime | None = None) -> tfpar.Trainer:
    """Trains the model on the same examples from the same seed; `stop_after` and `workdir` are among the options, and
    as `ahead` the worker that has made another model before, so that Keras gives its layers other names."""
    steps, spoiled, ahead = options.pop("steps", STEPS), options.pop("spoiled", None), options.pop("ahead", None)
    config = tfpar.ExperimentConfig.from_flat_dict({**COMMON, **options})
    if runtime is None:
        runtime = tfpar.initialize(config)
    keras.utils.clear_session(free_memory=False)
    if ahead == runtime.topology.worker:
        keras.Sequential()
    keras.config.set_dtype_policy(config.precision.precision)
    keras.utils.set_random_seed(1)
    trainer = tfpar.Trainer(
        build if spoiled is None else build_spoiled,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
    )
    trainer.fit(*data(spoiled), steps=steps)
    return trainer


def main(output: str, cases: str) -> None:
    worker = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
    runtime = None
    for number, options in enumerate(json.loads(cases)):
        if taken := options.pop("takes_over", None):
            take_over(options["workdir"], *taken, worker)
        trainer = train(options, runtime)
        runtime = trainer.runtime
        arrays = {variable.path: whole(variable) for variable in trainer.model.variables}
        slots = sum(variable.numpy().nbytes for variable in trainer.optimizer.variables)  # of the first replica
        program, replicas = trainer.program, runtime.topology.replicas
        gathered = program.placing.gathered(trainer.model, program.config)
        wire = gathered.added(program.exchange.traffic(replicas, 0), replicas).wire_bytes
        np.savez(os.path.join(output, f"{number}-{worker}.npz"), slots=slots, wire=wire, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])

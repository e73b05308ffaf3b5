"""A tf.data.Dataset on real workers: tests/integration/test_stream_workers.py.

python -m tests.integration.scripts.stream_workers STRATEGY SHARDING STOP_AFTER WORKDIR
"""

from __future__ import annotations

import json
import os
import sys

import tfpar

import keras
import numpy as np
import tensorflow as tf

EXAMPLES, BATCH, STEPS = 45, 8, 15


def rows(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Every n-th example: the share of one worker."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(30, seed=4).batch(6)


def main(strategy: str, sharding: str, stop_after: str, workdir: str) -> None:
    """Trains and evaluates; the chief writes `summary.json` and `evaluated.json` to `WORKDIR`."""
    config = tfpar.ExperimentConfig.from_flat_dict(
        {
            "strategy": strategy,
            "devices": 1,
            "global_batch_size": BATCH,
            "uneven_batches": True,
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "schedule": "constant",
            "exchange": "none",
            "jit_compile": "false",
            "checkpoint_every": 4,
            "stop_after": int(stop_after),
            "workdir": workdir,
        }
    )
    runtime = tfpar.initialize(config)
    keras.utils.set_random_seed(1)
    whole = rows(tf.distribute.InputContext())
    trainer = tfpar.Trainer(
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        config=config,
        runtime=runtime,
    )
    trainer.fit(whole if sharding == "example" else tfpar.inputs.from_dataset(rows), steps=STEPS)
    results = trainer.evaluate(whole)
    if json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0) == 0:
        with open(os.path.join(workdir, "evaluated.json"), "w", encoding="utf-8") as file:
            json.dump({name: float(value) for name, value in results.items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

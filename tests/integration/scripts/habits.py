"""A Keras user's script on a cluster: tests/integration/test_habits.py.

python -m tests.integration.scripts.habits STRATEGY OUTPUT
"""

from __future__ import annotations

import json
import os
import sys

import tfpar

import keras
import numpy as np

EXAMPLES, BATCH = 43, 8


class StopWhere(keras.callbacks.Callback):
    """Ends training after the second epoch, on the last worker alone."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self._stops = stops

    def on_epoch_end(self, epoch, logs=None):
        if self._stops and epoch == 1:
            self.model.stop_training = True


def main(strategy: str, output: str) -> None:
    """Trains with callbacks and predicts; writes what it found to `OUTPUT` with its rank in place of RANK."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank, workers = (task["task"]["index"], len(task["cluster"]["worker"])) if task else (0, 1)
    config = tfpar.ExperimentConfig.from_flat_dict(
        {
            "strategy": strategy,
            "devices": 1,
            "global_batch_size": BATCH,
            "uneven_batches": True,
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "schedule": "constant",
            "shuffle": False,
            "exchange": "none",
            "jit_compile": "false",
        }
    )
    runtime = tfpar.initialize(config)
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int32)
    source = tfpar.inputs.from_arrays(x, y)
    trainer = tfpar.Trainer(
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        config=config,
        runtime=runtime,
    )
    result = trainer.fit(source, epochs=5, validation=source, callbacks=[StopWhere(rank == workers - 1)])
    np.savez(
        output.replace("RANK", str(rank)),
        predicted=trainer.predict(source),
        epoch=result.epoch,
        **{f"history/{name}": values for name, values in result.history.items()},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

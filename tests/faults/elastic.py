"""A worker of the elastic test: trains on examples whose labels are their numbers, and records which were trained on.

python -m tests.faults.elastic FOLDER STOP_AFTER
"""

from __future__ import annotations

import os
import pathlib
import sys

import tfpar
from tfpar import inputs, models
from tfpar.config import ExperimentConfig
from tfpar.monitor.monitor import Monitor

import keras
import numpy as np

EXAMPLES, BATCH, EPOCHS = 120, 24, 4


class Seen(keras.metrics.Metric):
    """How often each example was trained on, at its weight."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.counts = self.add_weight(shape=(EXAMPLES,), initializer="zeros", name="counts")

    def update_state(self, y, outputs, sample_weight=None):
        del outputs
        self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(y, EXAMPLES) * sample_weight[:, None], axis=0))

    def result(self):
        return keras.ops.sum(self.counts)


def record(folder: pathlib.Path, trainer: tfpar.Trainer) -> None:
    """Adds up what was trained on, and writes down the residuals that a resumed run starts with."""
    reported, restored = Monitor.on_steps, trainer.exchange.restore
    seen = np.zeros(EXAMPLES)

    def on_steps(self, *arguments, metric_sums, **keywords):
        seen[:] += metric_sums[0]
        np.save(folder / f"seen-{os.getpid()}-{trainer.topology.worker}.npy", seen)
        return reported(self, *arguments, metric_sums=metric_sums, **keywords)

    def restore(workers, state_of):
        restored(workers, state_of)
        topology = trainer.topology
        np.savez(folder / f"restored-{topology.workers}-{topology.worker}.npz", **trainer.exchange.export())

    Monitor.on_steps, trainer.exchange.restore = on_steps, restore


def main(folder: pathlib.Path, stop_after: int) -> None:
    config = ExperimentConfig.from_flat_dict(
        {
            "model": "mlp",
            "global_batch_size": BATCH,
            "epochs": EPOCHS,
            "uneven_batches": True,
            "exchange": "int4:min_elements=1",
            "workdir": str(folder / "run"),
            "stop_after": stop_after,
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "schedule": "cosine",
            "jit_compile": "false",
        }
    )
    runtime = tfpar.initialize(config)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(EXAMPLES, 8, 8, 1)).astype(np.float32)
    source = inputs.from_arrays(x, np.arange(EXAMPLES, dtype=np.int32), num_classes=EXAMPLES)
    trainer = tfpar.Trainer(
        lambda: models.build("mlp", tfpar.task_spec(source)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[Seen()],
        config=config,
        runtime=runtime,
    )
    record(folder, trainer)
    trainer.fit(source, validation=source)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))

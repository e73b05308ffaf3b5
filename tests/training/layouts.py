"""The same training on any layout: used in this process and, as a script, in the processes of a cluster.

python -m tests.training.layouts OUTPUT.npz STRATEGY DEVICES ACCUMULATE_STEPS JIT_COMPILE
"""

from __future__ import annotations

import sys

import tfpar
from tfpar import inputs, models
from tfpar.config import ExperimentConfig

import keras
import numpy as np

STEPS = 30
EXAMPLES = 100  # with a batch of 24 the last one holds 4, which divides by neither 3 replicas nor 4 micro-batches x 2
BATCH = 24


def config(strategy: str, devices: int, accumulate_steps: int, **options) -> ExperimentConfig:
    return ExperimentConfig.from_flat_dict(
        {
            "strategy": strategy,
            "devices": devices,
            "accumulate_steps": accumulate_steps,
            "global_batch_size": BATCH,
            "uneven_batches": True,
            "seed": 3,
            "steps": STEPS,
            "optimizer": "sgd",
            "learning_rate": 0.05,
            "schedule": "constant",
            "clip_norm": 1.0,
            **options,
        }
    )


def examples() -> inputs.Source:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(EXAMPLES, 8, 8, 1)).astype(np.float32)
    y = (np.abs(x).sum(axis=(1, 2, 3)) > 51).astype(np.int32)
    return inputs.from_arrays(x, y, num_classes=2)


def train(strategy: str, devices: int, accumulate_steps: int, runtime=None, **options) -> tuple[tfpar.Trainer, dict]:
    chosen = config(strategy, devices, accumulate_steps, **options)
    runtime = runtime or tfpar.initialize(chosen)
    keras.utils.set_random_seed(3)
    source = examples()
    trainer = tfpar.Trainer(
        lambda: models.build(
            "convnet", tfpar.task_spec(source), widths=[8, 8], normalization="sync_batch", dropout=0.0
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        config=chosen,
        runtime=runtime,
    )
    return trainer, trainer.fit(source, validation=source)


def weights_of(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {variable.path: variable.numpy() for variable in trainer.model.weights}


if __name__ == "__main__":
    output, strategy, devices, accumulate_steps, jit_compile = sys.argv[1:]
    trainer, summary = train(strategy, int(devices), int(accumulate_steps), jit_compile=jit_compile)
    name = output.replace("WORKER", str(trainer.topology.worker))
    np.savez(name, **weights_of(trainer), params_sha256=np.asarray(summary["params_sha256"]))

"""Trainers of one small model on few examples, and the values that their runs leave."""

from __future__ import annotations

import tfpar
from tfpar import inputs

import keras
import numpy as np

EXAMPLES, BATCH, CLASSES = 40, 8, 3
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def source(count: int = EXAMPLES, seed: int = 0) -> inputs.Source:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 6)).astype(np.float32)
    return inputs.from_arrays(x, (np.abs(x).sum(axis=1) % CLASSES).astype(np.int32), num_classes=CLASSES)


def model(**options) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu", **options),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(CLASSES),
        ],
        name="net",
    )


def trainer_of(builder=model, optimizer=None, loss=SPARSE, **options) -> tfpar.Trainer:
    """A trainer as the first one of a process: Keras counts names (dense, dense_1, ...) over all models."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    return another_trainer(builder, optimizer, loss, **options)


def another_trainer(builder=model, optimizer=None, loss=SPARSE, **options) -> tfpar.Trainer:
    return tfpar.Trainer(
        builder,
        optimizer,
        loss,
        [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        **{
            "strategy": "one_device",
            "global_batch_size": BATCH,
            "uneven_batches": True,
            "jit_compile": False,  # these models train for a few steps; XLA is what other tests are about
            **options,
        },
    )


def everything(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {name: np.array(variable.numpy()) for name, variable in trainer.program.checkpoint_variables().items()}


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)

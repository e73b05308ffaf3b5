"""Runs whose batches differ in size, on real workers: tests/integration/test_short_batches.py.

python -m tests.integration.scripts.short_batches OUTPUT CASES

CASES is JSON: a list of options of an experiment, each of which is trained in turn. `OUTPUT/CASE-WORKER.npz` gets the
weights, and the exchange's state of this worker.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tfpar

import keras
import numpy as np

EXAMPLES, BATCH, STEPS, WIDTH = 17, 8, 6, 40  # two passes over batches of 8, 8 and 1
RATE = 0.5
COMMON = {
    "global_batch_size": BATCH,
    "optimizer": "sgd",
    "optimizer_args": "momentum=0.0",
    "learning_rate": RATE,
    "schedule": "constant",
    "uneven_batches": True,
    "verbose": 0,
}


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return tuple(generator.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for _ in range(2))  # type: ignore


def build() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    return keras.Model(
        inputs, [keras.layers.Dense(WIDTH, use_bias=False, name=name)(inputs) for name in ("first", "second")]
    )


def weighted(y: Any, outputs: Any) -> Any:
    """A loss whose gradient does not depend on weights: of an example, the outer product of x and y."""
    return keras.ops.sum(y * outputs, axis=-1)


def train(options: dict[str, Any]) -> tfpar.Trainer:
    steps = options.pop("steps", STEPS)
    config = tfpar.ExperimentConfig.from_flat_dict({**COMMON, **options})
    trainer = tfpar.Trainer(build, loss=weighted, config=config)
    x, y = data()
    trainer.fit(x, [y, -2.0 * y], steps=steps)
    return trainer


def own_weights(trainer: tfpar.Trainer) -> np.ndarray:
    """The weights, one after the other; with sharded state those that this worker owns, exact, and zeros."""
    share = trainer.program.share
    values = [variable.numpy().ravel() for variable in trainer.model.trainable_variables]
    if share is None:
        return np.concatenate(values)
    own = [np.zeros_like(value) for value in values]
    for owner in (replica for place in share.places for replica in place.replicas):
        for piece, variable in zip(owner.owned, owner.variables, strict=True):
            own[piece.index][piece.begin : piece.end] = variable.numpy().ravel()
    return np.concatenate(own)


def main(output: str, cases: str) -> None:
    for number, options in enumerate(json.loads(cases)):
        trainer = train(options)
        state = {name.replace("/", "."): array for name, array in trainer.exchange.export().items()}
        np.savez(f"{output}/{number}-{trainer.topology.worker}.npz", weights=own_weights(trainer), **state)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A worker that trains on data of its own, or with an option of its own: tests/integration/test_multi_worker.py.

python -m tests.integration.scripts.own_data data|option|name|nothing|models
"""

from __future__ import annotations

import json
import os
import sys

import tfpar

import keras
import numpy as np

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def weights() -> keras.Model:
    """Has other weights on the second worker."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="dense")])
    model.set_weights([np.full((4, 1), 1.0 + rank), np.zeros(1)])
    return model


def state() -> keras.Model:
    """Is adapted to other examples on each worker."""
    normalization = keras.layers.Normalization(name="normalization")
    normalization.adapt(np.arange(8.0).reshape(2, 4) + rank)
    return keras.Sequential([keras.Input((4,)), normalization, keras.layers.Dense(1)])


def same() -> keras.Model:
    """Is the same on each worker."""
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def report_refusals() -> None:
    """Prints why models, losses and metrics that differ between the workers are not trained."""
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    options = {"strategy": "multi_worker", "global_batch_size": 16, "jit_compile": "false", "verbose": 0}
    for what, build, loss, metrics in (
        ("weights", weights, "mse", None),
        ("state", state, "mse", None),
        ("loss", same, ["mse", "mae"][rank], [keras.losses.mean_squared_error]),
        ("metrics", same, keras.losses.MeanSquaredError(), [None, ["mae"]][rank]),
    ):
        try:
            tfpar.Trainer(build, "sgd", loss, metrics, **options).fit(x, x[:, :1], steps=2)
        except tfpar.ConfigError as error:
            print(f"{what} refused: {error}", flush=True)


def main(what: str) -> None:
    """Trains on two workers that are given the same, or not."""
    if what == "models":
        report_refusals()
        return
    count = 120 if what == "data" and rank else 200
    config = tfpar.ExperimentConfig.from_flat_dict(
        {
            "strategy": "multi_worker",
            "global_batch_size": 16,
            "jit_compile": "false",
            "eval_every": 5 if what == "option" and rank else 10,
        }
    )
    runtime = tfpar.initialize(config)
    x = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    trainer = tfpar.Trainer(
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
        loss="mean_squared_error",
        config=config,
        runtime=runtime,
    )
    name = f"arrays{rank}" if what == "name" else "arrays"  # as the path of a file that each host mounts elsewhere
    trainer.fit(tfpar.inputs.from_arrays(x, x[:, :1], name=name), steps=20)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except tfpar.ConfigError as error:
        sys.exit(f"error: {error}")

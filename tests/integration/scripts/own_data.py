"""A worker that trains on data of its own, or with an option of its own: tests/integration/test_multi_worker.py.

python -m tests.integration.scripts.own_data data|option|name|nothing
"""

from __future__ import annotations

import json
import os
import sys

import tfpar

import keras
import numpy as np


def main(what: str) -> None:
    """Trains on two workers that are given the same, or not."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
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

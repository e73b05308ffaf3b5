"""A Flower app: two nodes with examples of their own."""

from __future__ import annotations

import os

from tfpar.outer.federated import flower, partition

import keras
import numpy as np

OPTIONS = {
    "clients_per_round": 2,
    "rounds": 2,
    "local_epochs": 2,
    "client_batch": 8,
    "learning_rate": 0.1,
    "update_codec": "int8:block=64,min_elements=10",
    "seed": 4,
    "jit_compile": "false",
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build() -> keras.Model:
    return keras.Sequential([keras.Input([12]), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(5)])


def examples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.random((90, 12), np.float32), generator.integers(0, 5, 90).astype(np.int32)


def of_node(context) -> tuple[np.ndarray, np.ndarray]:
    x, y = examples()
    rows = partition.by_class(y, 2, 3, OPTIONS["seed"])[int(context.node_config["partition-id"])]
    return x[rows], y[rows]


if "TFPAR_TEST_WORKDIR" in os.environ:  # in Flower's processes
    client = flower.client_app(build, of_node, LOSS, **OPTIONS)
    server = flower.server_app(build, LOSS, workdir=os.environ["TFPAR_TEST_WORKDIR"], **OPTIONS)

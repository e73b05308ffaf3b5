"""Flower's own simulation of the clients of `federated.py`: started by it, in the environment that has Flower.

python experiments/benchmarks/federated_flower.py RESULT.json CLIENTS_PER_ROUND ROUNDS

A Ray actor builds and compiles the model once, which is more than Flower's examples do for speed, and the first rounds
are not timed. Nothing of tfpar is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

if __name__ == "__main__" and len(sys.argv) != 4:
    print((__doc__ or "").strip())  # before Flower, which the environment of a reader need not have
    raise SystemExit(0 if sys.argv[1:] in (["--help"], ["-h"]) else 2)

import flwr
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

CLIENTS = 100
_UNTIMED = 3  # rounds in which actors start and Keras traces its functions
_KEPT: dict[str, Any] = {}


def network() -> Any:
    """The model of `federated.py`, compiled."""
    import keras

    layers = [keras.Input([8, 8, 1]), keras.layers.Flatten(), keras.layers.Dense(128, activation="relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def examples() -> tuple[np.ndarray, np.ndarray]:
    """The training examples of Digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images[..., None] / 16.0).astype(np.float32)
    return x[:1437], digits.target[:1437].astype(np.int32)


def client() -> ClientApp:
    """A client that trains for an epoch in steps of 10."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        if not _KEPT:
            x, y = examples()
            order = np.random.default_rng(0).permutation(len(x))
            _KEPT.update(model=network(), parts=[(x[part], y[part]) for part in np.array_split(order, CLIENTS)])
        model = _KEPT["model"]
        x, y = _KEPT["parts"][int(context.node_config["partition-id"])]
        model.set_weights(message.content["arrays"].to_numpy_ndarrays())
        model.fit(x, y, epochs=1, batch_size=10, verbose=0)
        reply = {
            "arrays": ArrayRecord(model.get_weights()),
            "metrics": MetricRecord({"num-examples": len(x)}),
        }
        return Message(content=RecordDict(reply), reply_to=message)

    return app


def server(result: str, per_round: int, rounds: int) -> ServerApp:
    """A server that takes the mean, and notes how long that takes."""
    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        del context
        weights = network().get_weights()
        generator = np.random.default_rng(1)
        began = 0.0
        for number in range(_UNTIMED + rounds):
            if number == _UNTIMED:
                began = time.perf_counter()
            nodes = sorted(grid.get_node_ids())  # larger than any integer of NumPy
            chosen = [nodes[place] for place in generator.choice(len(nodes), per_round, replace=False)]
            messages = [
                Message(
                    content=RecordDict({"arrays": ArrayRecord(weights), "config": ConfigRecord({"round": number})}),
                    message_type="train",
                    dst_node_id=node,
                )
                for node in chosen
            ]
            replies = [reply for reply in grid.send_and_receive(messages) if not reply.has_error()]
            assert len(replies) == per_round, f"{per_round - len(replies)} clients failed"
            counts = np.array([reply.content["metrics"]["num-examples"] for reply in replies], np.float64)
            arrays = [reply.content["arrays"].to_numpy_ndarrays() for reply in replies]
            weights = [
                np.average(np.stack(each), axis=0, weights=counts).astype(np.float32)
                for each in zip(*arrays, strict=True)
            ]
        figures = {
            "clients": per_round * rounds,
            "seconds": time.perf_counter() - began,
            "version": flwr.__version__,
            "workers": os.cpu_count(),
        }
        with open(result, "w") as file:
            json.dump(figures, file)

    return app


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cores = os.cpu_count() or 1
    run_simulation(
        server(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])),
        client(),
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": cores, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )

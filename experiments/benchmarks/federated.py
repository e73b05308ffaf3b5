r"""Federated averaging, measured: rounds to an accuracy for each algorithm, and clients a second beside Flower.

python experiments/benchmarks/federated.py rounds --seeds=5
python experiments/benchmarks/federated.py speed --flower_python=FLOWER_ENVIRONMENT/bin/python

`rounds`: Digits on 100 clients, Dirichlet(0.1), 10 a round; the first round after which the server's weights have the
accuracy on the validation examples. `speed`: the same Keras model, clients, steps and cores, here and in Flower's own
simulation (Ray), in one call, one after the other. Flower needs an environment of its own where the protobuf that is
installed here is too new for it; see docs/federated.md.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from tfpar.config import ConfigError, ExperimentConfig, flags
from tfpar.inputs import build_splits
from tfpar.outer.federated import FederatedTrainer
from tfpar.training.loops.hooks import Hook
from tfpar.training.loops.state import LoopState

import keras
from absl import flags as absl_flags

_SEEDS = absl_flags.DEFINE_integer("seeds", 2, "rounds: seeds of each algorithm.")
_GOAL = absl_flags.DEFINE_float("goal", 0.95, "rounds: accuracy to reach.")
_MOST = absl_flags.DEFINE_integer("most", 500, "rounds: rounds to try, at most.")
_ONLY = absl_flags.DEFINE_string("only", "", "rounds: names of algorithms, separated by semicolons; empty: all.")
_FLOWER = absl_flags.DEFINE_string("flower_python", sys.executable, "speed: Python of the environment that has Flower.")
_CLIENTS = absl_flags.DEFINE_integer("speed_clients", 40, "speed: clients of a round.")
_ROUNDS = absl_flags.DEFINE_integer("speed_rounds", 5, "speed: rounds that are timed.")

# Learning rates of the server are guesses, not the result of a search.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"averaging": "fedavg"},
    "fedprox": {"averaging": "fedprox", "prox": 0.1},
    "fedavgm": {"averaging": "fedavgm", "server_learning_rate": 0.3},
    "fedadam": {"averaging": "fedadam", "server_learning_rate": 0.01},
    "fedyogi": {"averaging": "fedyogi", "server_learning_rate": 0.01},
    "scaffold": {"averaging": "scaffold"},
    "fedavg, int8, stateless": {"averaging": "fedavg", "update_codec": "int8"},
    "fedavg, topk:0.05, feedback": {"averaging": "fedavg", "update_codec": "topk:0.05", "stateful_clients": True},
}
COMMON: dict[str, Any] = {
    "partition": "dirichlet:0.1",
    "clients": 100,
    "clients_per_round": 10,
    "local_epochs": 5,
    "client_batch": 10,
    "optimizer": "sgd",
    "optimizer_args": "momentum=0",
    "learning_rate": 0.1,
    "schedule": "constant",
    "eval_every": 1,
    "clients_evaluated": 0,
    "eval_batch_size": 360,
    "verbose": 0,
}


def network() -> keras.Model:
    """One hidden layer of 128, as `--model=mlp` has two."""
    layers = [keras.Input([8, 8, 1]), keras.layers.Flatten(), keras.layers.Dense(128, activation="relu")]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def trainer_of(options: dict[str, Any]) -> FederatedTrainer:
    """A federation on Digits."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return FederatedTrainer(
        network, loss, [keras.metrics.SparseCategoricalAccuracy(name="accuracy")], **{**COMMON, **options}
    )


def rounds_to_goal(options: dict[str, Any], seed: int) -> int | None:
    """The first round after which the accuracy is reached, or None."""
    trainer = trainer_of({**options, "seed": seed, "rounds": _MOST.value})
    train, validation = build_splits(ExperimentConfig.from_flat_dict({"dataset": "digits"}).input, 0)
    reached: list[int] = []

    def stop(state: LoopState) -> LoopState | None:
        if state.results.get("accuracy", 0.0) < _GOAL.value:
            return None
        reached.append(state.step)
        return state.replace(stop=True, stopped_by="the goal")

    trainer.fit(train, validation=validation, hooks=[Hook(1, stop)])
    return reached[0] if reached else None


def measure_rounds() -> None:
    """Prints the table of rounds."""
    print(f"rounds to {_GOAL.value} on Digits, 100 clients, Dirichlet(0.1), 10 a round; at most {_MOST.value}\n")
    print("| algorithm | median | each seed |\n|---|---:|---|")
    wanted = [name.strip() for name in _ONLY.value.split(";") if name.strip()] or list(ALGORITHMS)
    for name in wanted:
        found = [rounds_to_goal(ALGORITHMS[name], seed) for seed in range(_SEEDS.value)]
        median = statistics.median(each if each is not None else float("inf") for each in found)
        print(
            f"| {name} | {median:g} | {', '.join('-' if each is None else str(each) for each in found)} |", flush=True
        )


def measure_speed() -> None:
    """Prints clients a second, here and in Flower's simulation."""
    options = {
        "partition": "iid",
        "clients_per_round": _CLIENTS.value,
        "local_epochs": 1,
        "rounds": 20 * _ROUNDS.value,
        "eval_every": 20 * _ROUNDS.value,
    }
    trainer = trainer_of({**options, "seed": 0})
    train, _ = build_splits(ExperimentConfig.from_flat_dict({"dataset": "digits"}).input, 0)
    summary = trainer.fit(train)
    per_client = train.info.num_examples / COMMON["clients"]
    ours = float(summary["examples_per_second"]) / per_client
    print(f"tfpar: {ours:.0f} clients a second, one process", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "flower.json"
        script = pathlib.Path(__file__).with_name("federated_flower.py")
        command = [_FLOWER.value, str(script), str(result), str(_CLIENTS.value), str(_ROUNDS.value)]
        environment = {**os.environ, "PYTHONPATH": "", "FLWR_TELEMETRY_ENABLED": "0"}
        subprocess.run(command, check=True, env=environment)
        flower = json.loads(result.read_text())
    rate = flower["clients"] / flower["seconds"]
    print(f"Flower {flower['version']}, simulation, {flower['workers']} Ray workers: {rate:.1f} clients a second")
    print(f"ratio: {ours / rate:.1f}")


def main(arguments: list[str]) -> None:
    chosen = {"rounds": measure_rounds, "speed": measure_speed}
    if len(arguments) != 2 or arguments[1] not in chosen:
        raise ConfigError(f"say which: {' or '.join(chosen)}")
    chosen[arguments[1]]()


if __name__ == "__main__":
    flags.run(main)

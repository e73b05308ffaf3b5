"""A worker of `experiments.benchmarks.slow_link`: trains a language model with TensorFlow's strategy or with tfpar."""

from __future__ import annotations

import time
from typing import Any

import tfpar
from experiments.benchmarks import fleet
from experiments.benchmarks.end_to_end_worker import LOSS, Workload, tensorflow_contender
from tfpar import inputs, models
from tfpar.config import ExperimentConfig, InputConfig
from tfpar.config.fields import parse_arguments
from tfpar.doctor import describe_machine

import keras
import tensorflow as tf

# Its dense exchange over 100 Mbit/s takes about ten times as long as computing a step.
WORKLOAD = Workload(
    "transformer_lm_tiny",
    {"width": 128, "depth": 4, "heads": 4},
    {
        "dataset": "text",
        "global_batch_size": 16,
        "sequence_length": 64,
        "remainder": "drop",
        "validation_fraction": 0.01,
    },
    1e-3,
)
_EVAL_BATCHES = 20


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Trains as asked; seconds of each interval between evaluations, and the last held-out loss."""
    request.pop("do")
    contender = request.pop("contender")
    options = request.pop("options")
    trained = _tensorflow(**request) if contender == "tensorflow" else _tfpar(options, **request)
    tokens = WORKLOAD.data["global_batch_size"] * WORKLOAD.data["sequence_length"]
    return {"machine": describe_machine(), "tokens": tokens, **trained}


def _tensorflow(seed: int, target: float, every: int, most: int) -> dict[str, Any]:
    model, train, held_out = tensorflow_contender(WORKLOAD, seed, jit_compile=True)
    assert held_out is not None
    config = InputConfig(global_batch_size=WORKLOAD.data["global_batch_size"])
    batches = list(inputs.Pipeline(held_out, config, training=False).dataset().take(_EVAL_BATCHES))
    losses = tf.function(lambda x, y: LOSS(y, model(x, training=False)))
    seconds, steps, loss = [], 0, float("inf")
    while steps < most and loss > target:
        began = time.perf_counter()
        train(every)
        seconds.append(time.perf_counter() - began)
        steps += every
        loss = sum(float(losses(x[0], y[0])) for x, y, _ in batches) / len(batches)
    return {"steps": steps, "seconds": seconds, "loss": loss, "parameters": model.count_params()}


def _tfpar(options: str, seed: int, target: float, every: int, most: int) -> dict[str, Any]:
    given = parse_arguments("--options", options, example="local_steps=50")
    fixed = {
        "model": WORKLOAD.model,
        "strategy": "multi_worker",
        "optimizer": "adam",
        "schedule": "constant",
        "learning_rate": WORKLOAD.learning_rate,
        "eval_every": every,
        "eval_steps": _EVAL_BATCHES,
        "steps": most,
        "seed": seed,
        "jit_compile": "true",
        "verbose": 0,
    }
    config = ExperimentConfig.from_flat_dict({**WORKLOAD.data, **fixed, **given})
    train, held_out = inputs.build_splits(config.input, seed)
    runtime = tfpar.initialize(config, train, held_out)
    trainer = tfpar.Trainer(
        lambda: models.build(WORKLOAD.model, tfpar.task_spec(train), **WORKLOAD.overrides),
        loss=LOSS,
        config=config,
        runtime=runtime,
    )
    seconds: list[float] = []
    clock = Clock(seconds)
    keras.utils.set_random_seed(seed)

    def stop(state: tfpar.LoopState) -> tfpar.LoopState:
        return state.replace(stop=state.results["loss"] <= target)

    summary = trainer.fit(train, validation=held_out, hooks=[tfpar.Hook(every, stop)], callbacks=[clock])
    count = trainer.model.count_params()
    return {"steps": summary["steps"], "seconds": seconds, "loss": summary["eval"]["loss"], "parameters": count}


class Clock(keras.callbacks.Callback):
    """Takes the time between evaluations."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self._seconds, self._began = seconds, time.perf_counter()

    def on_test_begin(self, logs: Any = None) -> None:
        self._seconds.append(time.perf_counter() - self._began)

    def on_test_end(self, logs: Any = None) -> None:
        self._began = time.perf_counter()


if __name__ == "__main__":
    fleet.explain(__doc__)
    fleet.serve(handle)

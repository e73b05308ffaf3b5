"""A worker on which only the chief calls a method of the trainer: tests/integration/test_unequal_calls.py.

python -m tests.integration.scripts.unequal_calls hook|evaluate|begin|epoch|hooks|both|batches
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import tfpar

import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
chief = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0


class Predicting(keras.callbacks.Callback):
    """Predicts on the chief, in one method."""

    def __init__(self, method: str, trainer: tfpar.Trainer) -> None:
        super().__init__()

        def predict(*_: Any) -> None:
            if chief:
                trainer.predict(x)

        setattr(self, method, predict)


class Batches(keras.callbacks.Callback):
    """Has methods for the batches of an evaluation and a prediction."""

    def on_test_batch_end(self, batch, logs=None):
        pass

    def on_predict_batch_end(self, batch, logs=None):
        pass


def report_refusals(trainer: tfpar.Trainer) -> None:
    """Prints why each method refuses callbacks that only the chief has."""
    y, callbacks = x[:, :1], [Batches()] if chief else []
    calls: list[Callable[[], Any]] = [
        lambda: trainer.evaluate(x, y, callbacks=callbacks),
        lambda: trainer.predict(x, callbacks=callbacks),
        lambda: trainer.fit(x, y, steps=4, validation=(x, y), callbacks=callbacks),
    ]
    for call in calls:
        try:
            call()
        except tfpar.ConfigError as error:
            print("refused:", error, flush=True)


def main(what: str) -> None:
    """Trains on two workers with a hook or callback that acts on one of them, or on both."""
    trainer = tfpar.Trainer(
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
        loss="mean_squared_error",
        strategy="multi_worker",
        global_batch_size=16,
        jit_compile="false",
        verbose=0,
    )

    def predict(state: tfpar.LoopState) -> None:
        if chief or what == "both":
            trainer.predict(x)

    def evaluate(state: tfpar.LoopState) -> None:
        if chief or what == "both":
            trainer.evaluate(x, x[:, :1])

    if what == "batches":
        report_refusals(trainer)
        return
    hooks: list[tfpar.Hook] = []
    callbacks: list[keras.callbacks.Callback] = []
    if what in ("hook", "both"):
        hooks.append(tfpar.Hook(12, predict))
    if what in ("evaluate", "both"):
        hooks.append(tfpar.Hook(12, evaluate))
    if what == "hooks" and chief:
        hooks.append(tfpar.Hook(5, lambda state: None))
    if what in ("begin", "epoch"):
        callbacks.append(Predicting("on_train_begin" if what == "begin" else "on_epoch_end", trainer))
    trainer.fit(x, x[:, :1], steps=20, hooks=hooks, callbacks=callbacks)


if __name__ == "__main__":
    main(sys.argv[1])

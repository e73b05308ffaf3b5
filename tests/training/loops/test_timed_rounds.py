"""Rounds of a given duration: how many steps a worker takes, and what ends them."""

from __future__ import annotations

import os
import signal

import tfpar
from tfpar.guards.watchdog import Watchdog
from tfpar.process.exit_codes import Preempted
from tfpar.training.loops.timed_rounds import run_for

import keras
import numpy as np
import pytest
import tensorflow as tf

HOUR = 3600.0


class Counted(keras.layers.Layer):
    """Counts its calls, and calls a function in each."""

    def __init__(self, then=lambda: None) -> None:
        super().__init__()
        self.calls, self._then = 0, then

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + 0.0 * tf.ensure_shape(tf.numpy_function(self._count, [], tf.float32), [])

    def _count(self) -> np.float32:
        self.calls += 1
        self._then()
        return np.float32(0.0)


def trainer_of(layer: Counted, **options) -> tfpar.Trainer:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])

    common = {"strategy": "one_device", "global_batch_size": 8, "jit_compile": False, "verbose": 0}
    return tfpar.Trainer(build, "sgd", "mse", round_seconds=HOUR, **{**common, "stall_timeout": 2 * HOUR, **options})


X = np.ones([80, 2], np.float32)  # an epoch of ten steps


def test_a_request_to_end_is_answered_between_two_calls():
    taken = []
    run_for(HOUR, 1000, lambda done, steps: taken.append(steps), lambda: len(taken) == 2)
    assert len(taken) == 2


def test_a_preempted_worker_does_not_finish_its_round():
    layer = Counted(lambda: layer.calls > 1 or os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted):
        trainer_of(layer).fit(X, X[:, :1], steps=2000)
    assert layer.calls == 1


def test_each_call_of_a_round_is_progress(monkeypatch):
    """The round of an hour ends with the run."""
    said, progress = [], Watchdog.progress

    def noted(self, what: str, *, patient: bool = False) -> None:
        said.append(what)
        progress(self, what, patient=patient)

    monkeypatch.setattr(Watchdog, "progress", noted)
    assert trainer_of(Counted()).fit(X, X[:, :1], steps=9)["rounds"] == 1
    assert "the steps after 1" in said

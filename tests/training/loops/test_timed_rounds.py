"""Rounds of a given duration: how many steps a worker takes, and what ends them."""

from __future__ import annotations

import os
import signal

import tfpar
from tests.outer.test_rounds import rounds_of
from tests.training.loops.test_joined_reports import Gathers
from tfpar.guards.watchdog import Watchdog
from tfpar.process.exit_codes import Preempted
from tfpar.training.loops.rounds import LoopRounds
from tfpar.training.loops.state import Interval
from tfpar.training.loops.timed_rounds import OwnSteps, limits, run_for

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
    assert said.count("a round after step 0") >= 2


@pytest.mark.parametrize("rates", [[1.0, 1.0], [3.0, 1.0], [10.0, 1.0, 0.9], [100.0, 1.0, 1.0, 1.0], [7.0]])
def test_workers_reach_a_stop_together(rates):
    rates = np.array(rates)
    for steps in (1, 2, 7, 10, 1000):
        most, seconds = limits(steps, rates)
        assert most.sum() == steps * len(rates)  # so that the run's step is exactly that of the stop
        assert most.min() >= 1
        times = most / rates
        assert seconds >= times.max()
        # None of the slowest worker's steps could be taken by another in less time.
        last = int(times.argmax())
        assert most[last] == 1 or ((most + 1) / rates).min() >= times.max()


def test_the_speeds_of_the_last_round_limit_the_next():
    rounds, *_ = rounds_of(local_steps=1, round_seconds=5.0)
    rounds.workers = 2
    loop = LoopRounds(None, rounds)
    assert loop.limits(10) == (5.0, 10)  # nothing is known
    done = Interval(np.ones(6), np.full(6, 4.0), np.ones(6, bool))
    # Of the other: its seconds, steps, loss, weight, examples of applied steps and of others, number of these others.
    other = Gathers(np.array([2.0, *(2.0, 8.0, 8.0, 8.0, 0.0, 0.0)]))
    joined, _ = loop.join_timed(OwnSteps(done, done.counts, np.zeros([6, 6]), last=None), 0, np.array([2.0]), other)
    assert len(joined.losses) == 4
    seconds, most = loop.limits(4)
    assert most == 6  # of 8
    assert 2.0 < seconds < 3.0
    assert loop.limits(1000) == (5.0, 1500)

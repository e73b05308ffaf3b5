"""Evaluation of snapshots: padding does not count, and the thread ends with the run, however that ends."""

from __future__ import annotations

import contextlib
import threading
import types

import tfpar
from tfpar import inputs
from tfpar.config import ConfigError
from tfpar.training import loops
from tfpar.training.loops import snapshot_evaluation
from tfpar.training.loops.snapshot_evaluation import SnapshotEvaluation

import keras
import numpy as np
import pytest

X = np.arange(1, 11, dtype=np.float32).reshape(10, 1)  # two batches of four, and one of two


class Watched(keras.layers.Layer):
    """Averages what it sees in a metric of its own."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        self.mean.update_state(x)
        return x


def whole(y, prediction):
    return keras.ops.mean((prediction - y) ** 2)


def evaluation_of(loss, batch_size=None) -> SnapshotEvaluation:
    """An evaluation of a model that returns its input. On one device: the chief uses nothing of its strategy."""
    trainer = tfpar.Trainer(
        lambda: keras.Sequential(
            [keras.Input((1,), batch_size=batch_size), Watched(), keras.layers.Dense(1, kernel_initializer="ones")]
        ),
        loss=loss,
        strategy="one_device",
        jit_compile=False,
        global_batch_size=4,
        verbose=0,
    )
    source = inputs.from_arrays(X, np.zeros_like(X))
    trainer.program.bind(source)
    return SnapshotEvaluation(trainer.program, source)


@pytest.mark.parametrize("loss", ["mse", whole])
def test_what_sees_whole_batches_sees_no_padding(monkeypatch, loss):
    monkeypatch.setattr(snapshot_evaluation, "_CHIEF", "/device:CPU:0")
    evaluation = evaluation_of(loss)
    evaluation.check()
    evaluation.start(3)
    results = evaluation.collect(wait=True).results
    assert results == pytest.approx({"loss": np.mean(X**2), "examples": 10, "mean": np.mean(X)}, rel=1e-6)


def test_what_cannot_do_without_padding_is_refused_or_left_out(monkeypatch):
    monkeypatch.setattr(snapshot_evaluation, "_CHIEF", "/device:CPU:0")
    with pytest.raises(ConfigError, match=r"loss 'whole' returns one value .* would count padding"):
        evaluation_of(whole, batch_size=4).check()
    evaluation = evaluation_of("mse", batch_size=4)
    evaluation.check()
    evaluation.start(3)
    assert evaluation.collect(wait=True).results == pytest.approx({"loss": np.mean(X**2), "examples": 10}, rel=1e-6)


def test_the_thread_ends_when_a_run_fails(monkeypatch):
    closed = []
    loop = types.SimpleNamespace(close=lambda: closed.append(True))
    context = types.SimpleNamespace(files=types.SimpleNamespace(abandon=lambda: None))
    monkeypatch.setattr(loops, "prepare", lambda *arguments: context)
    monkeypatch.setattr(loops, "ParameterServerLoop", lambda *arguments, **options: loop)
    monkeypatch.setattr(loops, "Run", lambda *arguments: None)
    program = types.SimpleNamespace(topology=types.SimpleNamespace(synchronous=False))
    closing = contextlib.ExitStack()
    loops.start_run(program, None, None, None, 1, None, (), (), closing)
    assert not closed
    closing.close()  # as `fit` does, however the run ends
    assert closed


def test_closing_does_not_wait_for_a_snapshot_that_nobody_collects(monkeypatch):
    """A failed run ends at once, and the thread as soon as it is done."""
    began, may_end, threads = threading.Event(), threading.Event(), []

    def evaluate(self, step):
        threads.append(threading.current_thread())
        began.set()
        assert may_end.wait(10)

    monkeypatch.setattr(SnapshotEvaluation, "_snapshot", lambda self: ())
    monkeypatch.setattr(SnapshotEvaluation, "_evaluate", evaluate)
    core = types.SimpleNamespace(evaluate=lambda *values: values)
    evaluation = SnapshotEvaluation(types.SimpleNamespace(core=core, jit_compile=False), None)
    evaluation.start(3)
    assert began.wait(30)
    evaluation.close()
    assert threads[0].is_alive()
    may_end.set()
    threads[0].join(30)
    assert not threads[0].is_alive()

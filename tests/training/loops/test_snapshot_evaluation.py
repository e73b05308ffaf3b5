"""The thread that evaluates snapshots ends with the run, however that ends."""

from __future__ import annotations

import contextlib
import threading
import types

from tfpar.training import loops
from tfpar.training.loops.snapshot_evaluation import SnapshotEvaluation


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

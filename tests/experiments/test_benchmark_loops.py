"""The step as benchmarks drive it."""

from __future__ import annotations

import tfpar
from experiments.benchmarks.loops import FrameworkLoop, take_turns
from tfpar import inputs

import keras
import numpy as np


def test_the_loop_of_benchmarks_trains_as_fit_does():
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)

    def trainer() -> tfpar.Trainer:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        options = {"strategy": "one_device", "global_batch_size": 8, "jit_compile": "false"}
        return tfpar.Trainer(model, keras.optimizers.SGD(0.1), "mse", **options)

    source = inputs.from_arrays(x, x[:, :1])
    measured, fitted = trainer(), trainer()
    FrameworkLoop(measured, source)(6)
    fitted.fit(source, steps=6)
    for ours, theirs in zip(measured.model.get_weights(), fitted.model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_turns_alternate():
    calls: list[tuple[str, int]] = []
    loops = {name: lambda steps, name=name: calls.append((name, steps)) for name in "ab"}
    times, first = take_turns(loops, rounds=3, seconds=0.0)
    assert {name: len(turns) for name, turns in times.items()} == {"a": 3, "b": 3}
    assert first.keys() == times.keys()
    assert [name for name, _ in calls[4:]] == list("ababab")

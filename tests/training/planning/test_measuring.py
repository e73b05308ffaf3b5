"""Which passes and updates are timed, for how long, and what is made of the times."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings

from tfpar.parallel.planner.machine import OPS, PROGRAM, STAGES, Point, Rates
from tfpar.process.cores import cores
from tfpar.training.planning import measuring
from tfpar.training.planning.counting import count_model
from tfpar.training.planning.machines import Given, machine_of
from tfpar.training.planning.measuring import Limits, Measured, measure

import keras
import pytest
import tensorflow as tf

LIMITS = Limits(examples=64, share=64, length=8, memory=1 << 30, stages=True, reports=False)
SLOWER = {PROGRAM: 1.0, STAGES: 1.5, OPS: 2.0}


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(64, "relu"), keras.layers.Dense(3)])


@pytest.fixture
def timed(monkeypatch):
    """Passes whose time is known: the calls, and a function that sets the seconds of one example."""
    calls: list[tuple[str, int, int]] = []
    each = {"seconds": 0.01}

    def took(step: str, model: keras.Model, examples: int, length: int) -> tuple[float, float]:
        calls.append((step, examples, length))
        seconds = SLOWER[step] * each["seconds"] * examples
        return seconds, 3 * seconds

    monkeypatch.setattr(measuring, "_step", lambda model, way: way)
    monkeypatch.setattr(measuring, "_timed", took)
    monkeypatch.setattr(measuring, "_kept_by", lambda step: 1000)
    monkeypatch.setattr(measuring, "_memory_rates", lambda optimizer, model, ways: (dict.fromkeys(ways, 1e9), 2e9))
    return calls, each


def measured(model: keras.Model, limits: Limits = LIMITS, **how: bool) -> Measured | None:
    costs = count_model(model, [], length=8)
    how = {"compiled": True, "compiles_update": True, **how}
    return measure(model, costs, keras.optimizers.AdamW(), limits, **how)


def test_every_way_to_run_is_timed_with_few_and_many_examples(model, timed):
    calls, _ = timed
    found = measured(model)
    assert calls == [(way, examples, 8) for way in (OPS, PROGRAM, STAGES) for examples in (1, 8, 64)]
    flops = 3 * count_model(model, [], length=8).flops
    assert {way: found.rates.seconds(way, flops, 32) for way in SLOWER} == pytest.approx(
        {way: 32 * 0.01 * slower for way, slower in SLOWER.items()}
    )
    assert found.rates.processor(OPS, flops, 32) == pytest.approx(3 * 32 * 0.02)
    assert found.flops == pytest.approx(flops / 0.01)
    assert found.rates.updates == {PROGRAM: 1e9, OPS: 1e9}
    kept = sum(layer.kept for layer in count_model(model, [], length=8).whole)
    assert found.fused_in_stages == pytest.approx(1000 / (64 * kept))


def test_without_xla_one_way_is_timed(model, timed):
    calls, _ = timed
    found = measured(model, compiled=False, compiles_update=False)
    assert {way for way, *_ in calls} == {OPS}
    assert found.rates.updates == {OPS: 1e9}
    assert found.rates.seconds(PROGRAM, 1.0, 4) == found.rates.seconds(OPS, 1.0, 4)


@pytest.mark.parametrize(("seconds", "sizes"), [(0.6, {1}), (0.15, {1, 2, 6}), (1e-4, {1, 8, 64})])
def test_slow_passes_are_timed_with_fewer_examples(model, timed, seconds, sizes):
    calls, each = timed
    each["seconds"] = seconds
    measured(model, compiled=False)
    assert {examples for _, examples, _ in calls} == sizes


def test_activations_must_fit(model, timed):
    calls, _ = timed
    kept = sum(layer.kept for layer in count_model(model, [], length=8).whole)
    measured(model, dataclasses.replace(LIMITS, memory=int(9.5 * kept)), compiled=False)
    assert {examples for _, examples, _ in calls} == {1, 3, 9}
    assert measured(model, dataclasses.replace(LIMITS, memory=int(kept) // 2)) is None


def test_real_passes_and_updates(model):
    found = measured(model, dataclasses.replace(LIMITS, examples=2))
    assert {*found.rates.passes} == {PROGRAM, STAGES, OPS}
    assert all(min(point) > 0.0 for points in found.rates.passes.values() for point in points)
    assert 1e6 < min(found.rates.updates.values()) < 1e13
    assert 1e6 < found.rates.adding < 1e13
    assert 0.0 < found.fused_in_stages < 1.0
    muon = measure(model, count_model(model, []), keras.optimizers.Muon(), LIMITS, compiled=False, compiles_update=True)
    assert muon.rates.updates == {PROGRAM: muon.rates.adding, OPS: muon.rates.adding}


def test_a_pass_that_fails_leaves_the_other_ways(model, timed, monkeypatch, caplog):
    took = measuring._timed

    def failing(step: str, *others: object) -> tuple[float, float]:
        if step == fails:
            raise ValueError("XLA cannot compile this")
        return took(step, *others)

    monkeypatch.setattr(measuring, "_timed", failing)
    fails = PROGRAM
    assert {*measured(model).rates.passes} == {OPS}
    assert "a pass could not be timed (program): XLA cannot compile this" in caplog.text
    fails = OPS
    assert measured(model) is None
    assert measuring.assumed("float32").flops > 1e6


def test_memory_of_a_share_is_that_of_a_program_which_is_only_compiled(model, timed, monkeypatch):
    compiled: list[int] = []
    monkeypatch.setattr(measuring, "_compile", lambda step, model, examples, length: compiled.append(examples))
    monkeypatch.setattr(
        measuring, "_reported", lambda reports: contextlib.nullcontext(lambda: 4000 * (compiled or [1])[-1])
    )
    limits = dataclasses.replace(LIMITS, share=24, reports=True)
    found = measured(model, limits)
    assert compiled == [24]
    kept = sum(layer.kept for layer in count_model(model, [], length=8).whole)
    assert found.fused == pytest.approx({1: 4000 / kept, 8: 500 / kept, 24: 4000 / kept, 64: 62.5 / kept})
    assert [*found.fused] == [1, 8, 24, 64]
    assert {*found.fleeting} == {1, 8, 64}
    assert Measured.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found
    for others in ({"share": 8}, {"reports": False}):
        measured(model, dataclasses.replace(limits, **others))
    assert compiled == [24]


def test_a_program_is_compiled_without_warnings(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measuring._compile(measuring._step(model, PROGRAM), model, 2, 8)


def test_tracing_and_compiling_do_not_count(monkeypatch):
    """However long they take: a first call that took over 10 s was taken for a slow pass."""
    clock = iter([100.0, 100.25, 200.0, 201.5, 300.0, 300.5])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    calls: list[int] = []

    def call() -> tf.Tensor:
        calls.append(1)
        return tf.zeros([])

    assert measuring._fastest(call)[0] == 0.25
    assert len(calls) == 1 + 2  # the two that are timed take more than a second together


def test_slow_ways_are_left_out(model, timed, monkeypatch):
    monkeypatch.setattr(measuring, "_BUDGET_S", -1.0)
    assert {*measured(model).rates.passes} == {OPS}


def test_workers_of_one_machine_share_its_cores_and_memory():
    found = Measured(Rates(passes={OPS: [Point(1, 1e-9, 2e-9)]}, updates={OPS: 4e9}, adding=8e9))
    alone, shared = (
        machine_of(2, 1, "CPU", precision="float32", measured=found, given=Given(), workers_here=workers)
        for workers in (1, 2)
    )
    assert (alone.flops, alone.rates.update(OPS), alone.rates.adding) == pytest.approx((1e9, 4e9, 8e9))
    assert (shared.flops, shared.rates.update(OPS), shared.rates.adding) == pytest.approx((5e8, 2e9, 4e9))
    assert (alone.sharing, shared.sharing, shared.cores) == (1, 2, cores())
    given = machine_of(2, 1, "CPU", precision="float32", measured=found, given=Given(flops=3e9))
    assert (given.rates.seconds(PROGRAM, 3e9, 2), given.cores) == (pytest.approx(2.0), 0)

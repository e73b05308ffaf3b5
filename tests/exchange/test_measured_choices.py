"""Choices from measurements that all workers make together: of parts of a replica, and of a forecast."""

from __future__ import annotations

import dataclasses
import time

from tests.collectives.one_member import group_of_one
from tfpar.collectives.cost_model import Link, Speed
from tfpar.collectives.tensorflow import new_group, world_group
from tfpar.exchange import spec as specs
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.per_device import per_device_reducer, places_of_part
from tfpar.exchange.registry import TuningResult
from tfpar.exchange.tuning import measure, rehearsal
from tfpar.exchange.tuning.auto import _candidates
from tfpar.exchange.tuning.forecast import forecast
from tfpar.exchange.tuning.measure import Measured

import pytest
import tensorflow as tf

SHAPES = [tf.TensorShape([64, 64]), tf.TensorShape([64, 32]), tf.TensorShape([7])]


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, ...]]:
    """Members of the groups that measure. They find a slow link."""
    groups = []

    def found(group, codecs, device):
        groups.append(group.members)
        return Measured(Link(1e-3, 12.5e6), [Speed(5e9, 5e9)] * len(codecs), [0.01] * len(codecs))

    monkeypatch.setattr(measure, "measure", found)
    return groups


def test_parts_of_a_replica_measure_once_together_and_choose_alike(asked):
    """Four workers, of which 0 and 1, 2 and 3 have a replica each; the second weight is divided."""
    tables = []
    for part, members in enumerate([(0, 2), (1, 3)]):
        reducer = per_device_reducer(
            specs.parse("auto:min_elements=64"),
            SHAPES,
            new_group(members, members[0]),
            tf.distribute.OneDeviceStrategy("CPU:0"),
            0,
            places_of_part([1], len(SHAPES), 1, 2, part),
        )
        assert reducer.devices == 2
        tables.append(reducer.plan_table)
    assert asked == [(0, 1, 2, 3)] * 2
    assert tables[0] == tables[1]
    assert "bucket 0: 4,096 elements: " in tables[0]


def test_a_codec_that_is_named_measures_nothing(asked):
    replica = places_of_part([1], len(SHAPES), 1, 2, 0)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    assert per_device_reducer(specs.parse("int8"), SHAPES, new_group((0, 2), 0), strategy, 0, replica).compresses
    assert not asked


@pytest.mark.parametrize(("now", "changes"), [(0.98, False), (0.96, True)])
def test_a_plan_changes_only_for_a_gain(now, changes):
    """Measurements of the same links vary, and a change is traced again."""
    auto = specs.parse("auto:min_elements=64")
    chosen, seconds = ["int8"], {"int8": 1.0, "int4": now}

    def choose(spec, elements, *_):
        plan = [specs.parse(chosen[-1])] * len(elements)
        return TuningResult(plan, chosen[-1], lambda found: sum(seconds[one.name] for one in found))

    given = dataclasses.replace(auto.algorithm, measure=lambda *_: None, choose=choose)
    reducer = CompressedReducer(
        dataclasses.replace(auto, algorithm=given), SHAPES, world_group(2, 0), "/device:CPU:0", 0
    )
    assert not reducer.retune()
    chosen.append("int4")
    assert reducer.retune() == changes
    assert reducer.plan_table == ("int4" if changes else "int8")


def test_auto_predicts_the_time_of_any_plan(asked):
    spec, group, elements = specs.parse("auto"), world_group(4, 0), [1 << 20, 1 << 10]
    result = spec.algorithm.choose(spec, elements, group, spec.algorithm.measured(spec, group, "CPU:0"))
    slower = [one for one in _candidates(spec.options, group) if one.name == "none"] * 2
    assert result.seconds(result.specs) < 0.5 * result.seconds(slower)
    assert result.improves_on(slower)
    assert result.improves_on([specs.parse("topk")] * 2)  # not among the candidates
    assert not result.improves_on(result.specs)


def test_a_forecast_has_the_choices_of_auto(asked):
    found = forecast(specs.parse("auto:min_elements=64"), SHAPES, world_group(4, 0), "CPU:0")
    assert asked == [(0, 1, 2, 3)] * 2  # for the choice, and for the codecs that were chosen
    chosen = [bucket.spec.name for bucket in found.sent if bucket.elements > 7]
    assert chosen
    assert "auto" not in chosen
    assert found.cost(4).seconds > 0.0


BUCKET = tf.TensorShape([1 << 11, 1 << 11])  # 16 MiB


def predicted(monkeypatch, link, device="CPU:0"):
    """The forecast of eight buckets, and how many of them were rehearsed, which took 0.4 s."""
    rehearsed = []

    def seconds_of(spec, shapes, *_):
        rehearsed.append(len(shapes))
        return 0.4

    monkeypatch.setattr(measure, "measure", lambda *_: Measured(link, [Speed(1e9, 1e9)], [0.01], Speed(1e9, 1e9)))
    monkeypatch.setattr(rehearsal, "seconds_of", seconds_of)
    return forecast(specs.parse("int8"), [BUCKET] * 8, world_group(4, 0), device), rehearsed


def test_a_rehearsal_with_some_buckets_corrects_a_forecast(monkeypatch):
    """For the workers that rehearsed; others would share processors otherwise."""
    link = Link(1e-4, 2e9, 1e-9, 1 << 20)
    found, rehearsed = predicted(monkeypatch, link)
    plain = dataclasses.replace(found, factor=1.0)
    part = dataclasses.replace(plain, sent=plain.sent[: rehearsed[0]], speeds=plain.speeds[: rehearsed[0]])
    assert 1 < rehearsed[0] < 8
    assert part.cost(4).seconds >= 0.1
    assert found.cost(4).seconds == pytest.approx(plain.cost(4).seconds * 0.4 / part.cost(4).seconds)
    assert found.cost(16) == plain.cost(16)


@pytest.mark.parametrize(("link", "device"), [(Link(1e-4, 1e7), "CPU:0"), (Link(1e-4, 2e9), "GPU:0")])
def test_nothing_is_rehearsed_on_a_slow_link_or_a_gpu(monkeypatch, link, device):
    """The link takes nearly all of the time; or the GPU has not begun when the call returns."""
    found, rehearsed = predicted(monkeypatch, link, device)
    assert not rehearsed
    assert found.factor == 1.0


@pytest.mark.parametrize("exchange", ["none", "int8:warmup_steps=9"])
def test_a_rehearsal_is_timed(exchange):
    began = time.perf_counter()
    with group_of_one() as group:
        seconds = rehearsal.seconds_of(specs.parse(exchange), SHAPES, group, "/device:CPU:0", None)
    assert 0.0 < seconds < time.perf_counter() - began

"""Schedules against their formulas in numpy, in Python, in a graph and under XLA; plateau against a written history."""

from __future__ import annotations

import json
import math

from tfpar.config import ConfigError, ScheduleConfig
from tfpar.optim import schedules

import keras
import numpy as np
import pytest
import tensorflow as tf

PEAK, TOTAL = 0.4, 100


def _build(schedule, args="", warmup=0, total=TOTAL):
    config = ScheduleConfig(schedule=schedule, schedule_args=args, warmup_steps=warmup)
    return schedules.build(config, PEAK, total)


def _curve(schedule, total=TOTAL):
    return np.array([float(schedule(step)) for step in range(total)])


def _cosine(t, total, final=0.0):
    return PEAK * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(t, total) / total)))


def _one_cycle(t, rise, start=0.04, final=4e-6):
    if t < rise:
        return PEAK * (start + (1 - start) * 0.5 * (1 - math.cos(math.pi * t / rise)))
    return PEAK * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (t - rise) / (TOTAL - rise))))


def _triangle(t, cycle=25, minimum=0.1):
    """Smith 2017, as the paper writes it, with stepsize = cycle / 2."""
    size = cycle / 2
    number = math.floor(1 + t / (2 * size))
    x = abs(t / size - 2 * number + 1)
    return minimum * PEAK, (PEAK - minimum * PEAK) * max(0.0, 1 - x), number


CASES = {
    "constant": ("constant", "", lambda t: PEAK),
    "plateau": ("plateau", "patience=3", lambda t: PEAK),
    "cosine": ("cosine", "", lambda t: _cosine(t, TOTAL)),
    "cosine_final": ("cosine", "final=0.1", lambda t: _cosine(t, TOTAL, 0.1)),
    "step": ("step", "", lambda t: PEAK * 0.1 ** ((t >= 50) + (t >= 75))),
    "step_at": ("step", "milestones=[10,20,90],factor=0.5", lambda t: PEAK / 2 ** ((t >= 10) + (t >= 20) + (t >= 90))),
    "one_cycle": ("one_cycle", "", lambda t: _one_cycle(t, 30)),
    "one_cycle_rise": ("one_cycle", "rise=0.5,start=0.1,final=0.01", lambda t: _one_cycle(t, 50, 0.1, 0.01)),
    "cyclic": ("cyclic", "", lambda t: sum(_triangle(t)[:2])),
    "cyclic_2": (
        "cyclic",
        "mode=triangular2,cycle_steps=10,minimum=0",
        lambda t: _triangle(t, 10, 0.0)[1] / 2 ** (_triangle(t, 10)[2] - 1),
    ),
    "cyclic_exp": (
        "cyclic",
        "mode=exp_range,gamma=0.99",
        lambda t: _triangle(t)[0] + _triangle(t)[1] * 0.99**t,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(CASES))
def test_schedule_follows_its_formula(case):
    name, args, formula = CASES[case]
    np.testing.assert_allclose(_curve(_build(name, args)), [formula(t) for t in range(TOTAL)], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("warmup", [0, 7])
def test_same_rate_in_python_graph_and_xla(case, warmup):
    name, args, _ = CASES[case]
    if name == "one_cycle" and "rise" in args:
        warmup = 0
    schedule = _build(name, args, warmup)
    compiled = tf.function(schedule, jit_compile=True, autograph=False)
    for step in (0, 1, 6, 7, 49, 50, 99):
        expected = schedule(step)
        assert expected.dtype == tf.float32
        assert expected.shape == ()
        for given in (tf.constant(step, tf.int64), tf.constant(float(step))):
            result = compiled(given)
            assert result.dtype == tf.float32
            np.testing.assert_allclose(float(result), float(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", sorted(CASES))
def test_schedule_serves_a_keras_optimizer_and_is_saved_with_it(case):
    name, args, _ = CASES[case]
    schedule = _build(name, args, warmup=0 if "rise" in args else 5)
    optimizer = keras.optimizers.SGD(schedule)
    loaded = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    np.testing.assert_allclose(_curve(loaded._learning_rate, 30), _curve(schedule, 30))
    variable = keras.Variable(0.0)
    optimizer.build([variable])
    optimizer.apply([tf.constant(1.0)])
    assert float(variable) == pytest.approx(-float(schedule(0)))


@pytest.mark.parametrize("name", ["constant", "cosine", "step", "cyclic", "plateau"])
def test_warm_up_is_linear_never_zero_and_shifts_the_rest(name):
    warmup = 9
    curve = _curve(_build(name, warmup=warmup))
    start = float(_build(name, warmup=warmup)(warmup))
    np.testing.assert_allclose(curve[:warmup], start * np.arange(1, warmup + 1) / (warmup + 1), rtol=1e-5)
    assert curve[0] > 0
    if name == "cosine":
        np.testing.assert_allclose(
            curve[warmup:], [_cosine(t, TOTAL - warmup) for t in range(TOTAL - warmup)], rtol=2e-5
        )
    if name == "step":  # milestones count from the start of training
        assert curve[49] == pytest.approx(PEAK)
        assert curve[50] == pytest.approx(PEAK / 10)


def test_warm_up_of_one_cycle_is_its_rise():
    np.testing.assert_allclose(
        _curve(_build("one_cycle", warmup=20)), [_one_cycle(t, 20) for t in range(TOTAL)], rtol=1e-4
    )


def test_a_warm_up_of_one_cycle_that_rounds_to_nothing_is_one_step():
    curve = _curve(_build("one_cycle", warmup=0.004))
    np.testing.assert_allclose(curve, [_one_cycle(t, 1) for t in range(TOTAL)], rtol=1e-4)
    with pytest.raises(ConfigError, match="give one of them"):
        _build("one_cycle", "rise=0.2", warmup=0.004)
    assert _curve(_build("one_cycle", warmup=0.004, total=1), 1)[0] > 0


def test_rates_stay_at_their_end_beyond_the_run():
    assert float(_build("cosine", "final=0.25")(10 * TOTAL)) == pytest.approx(PEAK / 4)
    assert float(_build("one_cycle", "final=0.25")(10 * TOTAL)) == pytest.approx(PEAK / 4)


@pytest.mark.parametrize(
    ("schedule", "args", "warmup", "message"),
    [
        ("cosin", "", 0, r"--schedule='cosin'.*'cosine'"),
        ("cosine", "finall=0.1", 0, r"--schedule_args='finall'.*'final'"),
        ("cosine", "final=2", 0, "between 0 and 1"),
        ("cosine", "final=high", 0, "final is a number"),
        ("constant", "final=1", 0, "takes no arguments"),
        ("step", "milestones=0.5", 0, "list of numbers"),
        ("step", "milestones=[0.7,0.6]", 0, r"milestones=\[0.7, 0.6\] must be positive and increase"),
        ("step", "milestones=[0.001,0.002]", 0, r"are steps \[0, 0\] of 100, which must differ"),
        ("step", "milestones=[0.5,20]", 0, "all are shares, at most 1, or all are step numbers"),
        ("step", "milestones=[0.05]", 10, "after the warm-up"),
        ("step", "milestones=[]", 0, "empty"),
        ("one_cycle", "rise=0.2", 10, "give one of them"),
        ("cyclic", "mode=triangle", 0, "'triangular'"),
        ("cyclic", "cycle_steps=1", 0, "at least 2"),
        ("cyclic", "cycle_steps=2.5", 0, r"cycle_steps=2\.5: cycle_steps is a whole number"),
        ("step", "milestones=[true,2]", 0, "list of numbers"),
        ("plateau", "patience=2.5", 0, r"patience=2\.5: patience is a whole number"),
        ("plateau", "patient=3", 0, "'patience'"),
        ("constant", "", TOTAL, r"--warmup_steps=100 .*100 steps"),
        ("constant", "", 2.5, r"--warmup_steps=2\.5 is neither"),
    ],
)
def test_errors_name_the_flag_and_the_way_out(schedule, args, warmup, message):
    with pytest.raises(ConfigError, match=message):
        _build(schedule, args, warmup)


def test_warm_up_may_be_a_share_of_the_run():
    np.testing.assert_array_equal(_curve(_build("cosine", warmup=0.054)), _curve(_build("cosine", warmup=5)))
    assert float(_build("constant", warmup=0.9, total=1)(0)) == pytest.approx(PEAK)  # a step is left for the schedule


def test_check_needs_no_length_of_the_run():
    for warmup in (500, 0.1):
        step = ScheduleConfig(schedule="step", schedule_args="milestones=[30000,60000]", warmup_steps=warmup)
        schedules.check_schedule(step)
    for schedule, args in (("cosine", "finall=1"), ("plateau", "patience=0")):
        with pytest.raises(ConfigError):
            schedules.check_schedule(ScheduleConfig(schedule=schedule, schedule_args=args))


# --- plateau ---------------------------------------------------------------------------------------------------------


def _multipliers(controller, values):
    return [controller.update(value) for value in values]


def test_plateau_reduces_after_patience_and_counts_anew():
    controller = schedules.PlateauController(factor=0.5, patience=2, min_delta=0.1)
    #           first  better  within delta  bad again: cut   better    bad  bad: cut
    history = [(1.0, 1.0), (0.8, 1.0), (0.75, 1.0), (0.9, 0.5), (0.5, 0.5), (0.6, 0.5), (0.6, 0.25)]
    assert _multipliers(controller, [value for value, _ in history]) == [multiplier for _, multiplier in history]
    assert controller.multiplier == 0.25


def test_plateau_cools_down_and_has_a_floor():
    controller = schedules.PlateauController(factor=0.1, patience=1, cooldown=2, minimum=0.05)
    assert _multipliers(controller, [1.0] * 7) == [1.0, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05]


def test_plateau_can_watch_accuracy_and_ignores_nan():
    controller = schedules.PlateauController(factor=0.5, patience=2, mode="max")
    assert _multipliers(controller, [math.nan, 0.5, 0.6, math.nan, 0.55]) == [1.0, 1.0, 1.0, 1.0, 0.5]


def test_plateau_resumes_from_json():
    values = np.random.default_rng(0).random(60).round(2)
    whole = schedules.PlateauController(patience=3, cooldown=1, factor=0.7)
    expected = _multipliers(whole, values)
    assert expected[-1] < 0.5
    for cut in (0, 17, 31):
        first = schedules.PlateauController(patience=3, cooldown=1, factor=0.7)
        before = _multipliers(first, values[:cut])
        second = schedules.PlateauController(patience=3, cooldown=1, factor=0.7)
        second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert before + _multipliers(second, values[cut:]) == expected


def test_plateau_comes_from_the_configuration():
    config = ScheduleConfig(schedule="plateau", schedule_args="factor=0.5,patience=1")
    controller = schedules.plateau(config)
    assert _multipliers(controller, [1.0, 1.0]) == [1.0, 0.5]
    assert schedules.plateau(ScheduleConfig(schedule="cosine")) is None
    for args, message in (("factor=1.5", "between 0 and 1"), ("patience=0", "at least 1"), ("mode=best", "'max'")):
        with pytest.raises(ConfigError, match=message):
            schedules.plateau(ScheduleConfig(schedule="plateau", schedule_args=args))

"""How long calls from Python are, and which of them report norms."""

from __future__ import annotations

from tfpar.training.loops.pacing import NormPacing, StepsPerCall, next_multiple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.without_keras


FAR = [10**9]


def test_the_first_call_compiles_the_second_measures_the_third_is_about_half_a_second_long():
    pace = StepsPerCall()
    assert pace.next(0, FAR) == 1
    pace.measured(1, 30.0)  # compilation says nothing about the pace
    assert pace.next(1, FAR) == 1  # which may take seconds as well
    pace.measured(1, 0.002)
    assert pace.next(2, FAR) == 250
    pace.measured(250, 1.0)
    assert pace.next(252, FAR) == 125


@pytest.mark.parametrize(("seconds_per_step", "steps"), [(10.0, 1), (0.6, 1), (0.25, 2), (1e-6, 2000), (0.0, 2000)])
def test_slow_steps_go_one_by_one_and_fast_ones_are_bounded(seconds_per_step, steps):
    pace = StepsPerCall()
    pace.measured(1, 1.0)
    pace.measured(5, 5 * seconds_per_step)
    assert pace.next(6, FAR) == steps


def test_a_fixed_pace_does_not_adapt():
    pace = StepsPerCall(7)
    for seconds in (100.0, 1e-9, 3.0):
        assert pace.next(0, FAR) == 7
        pace.measured(7, seconds)


@settings(max_examples=100, deadline=None)
@given(
    fixed=st.integers(0, 50),
    every=st.integers(1, 40),
    total=st.integers(1, 200),
    seconds=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=20),
)
def test_calls_meet_every_boundary_exactly(fixed, every, total, seconds):
    pace, step, visited = StepsPerCall(fixed), 0, []
    while step < total:
        steps = pace.next(step, [total, next_multiple(step, every)])
        assert steps >= 1
        step += steps
        pace.measured(steps, seconds[len(visited) % len(seconds)])
        visited.append(step)
    assert visited[-1] == total
    assert set(range(every, total + 1, every)) <= set(visited)


@settings(max_examples=100, deadline=None)
@given(step=st.integers(0, 10**12), every=st.integers(1, 10**6))
def test_next_multiple_is_the_first_one_after(step, every):
    found = next_multiple(step, every)
    assert found % every == 0
    assert step < found <= step + every


def reporting_steps(total, steps, seconds, *, records=True, cadence=10, timed=True):
    """The last steps of the calls that report norms, if every call has so many steps and takes so many seconds."""
    clock = [100.0]
    chief = NormPacing(records, cadence, total, timed=timed, now=lambda: clock[0])
    other = NormPacing(False, cadence, total, timed=timed, now=lambda: -3.0 * clock[0])  # another clock
    found = []
    for first in range(0, total, steps):
        wanted = chief.wanted(first, steps)
        assert other.wanted(first, steps) is wanted
        clock[0] += seconds
        answers = [pacing.own_answer(wanted, steps, seconds) for pacing in (chief, other)]
        for pacing in (chief, other):
            pacing.answered(answers)
        if wanted:
            found.append(first + steps)
    return found


def test_slow_steps_report_norms_every_ten_seconds_and_where_a_point_is_due():
    assert reporting_steps(24, 1, 2.4) == [1, 6, 10, 15, 20, 24]
    assert reporting_steps(6, 1, 30.0) == [1, 2, 3, 4, 5, 6]


def test_calls_of_several_steps_report_norms_every_two_seconds():
    assert reporting_steps(1000, 25, 0.5, cadence=10**6) == [25, *range(125, 1000, 100), 1000]


def test_points_at_fixed_steps_alone_decide_if_the_user_sets_them():
    assert reporting_steps(100, 1, 60.0, cadence=30, timed=False) == [30, 60, 90, 100]
    assert reporting_steps(100, 20, 0.1, cadence=30, timed=False) == [40, 60, 100]


def test_norms_that_nobody_records_are_computed_only_once():
    assert reporting_steps(100, 1, 60.0, records=False) == [1]

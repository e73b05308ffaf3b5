"""The state that loops hand to hooks: the training loss of the last epoch."""

from __future__ import annotations

from tfpar.config import ConfigError
from tfpar.training.loops.state import Interval, LoopState, RunningResults

import numpy as np
import pytest

STEPS, PER_EPOCH = 23, 5


def run(*calls: int) -> list[LoopState]:
    """The states after calls of so many steps; steps differ in examples, and one is not applied."""
    generator = np.random.default_rng(0)
    losses, counts = generator.uniform(0.1, 3.0, STEPS).astype(np.float32), generator.integers(1, 9, STEPS)
    applied = np.arange(STEPS) != 11
    losses[11] = np.nan
    state, states = LoopState(0, STEPS), []
    for call in calls:
        part = slice(state.step, state.step + call)
        done = Interval(losses[part], counts[part].astype(np.float64), applied[part])
        state = state.advanced(done, steps_per_epoch=PER_EPOCH)
        states.append(state)
    return states


def expected(step: int) -> float:
    generator = np.random.default_rng(0)
    losses, counts = generator.uniform(0.1, 3.0, STEPS).astype(np.float32), generator.integers(1, 9, STEPS)
    chosen = [index for index in range((step - 1) // PER_EPOCH * PER_EPOCH, step) if index != 11]
    return float(np.average(losses[chosen].astype(np.float64), weights=counts[chosen]))


def test_the_training_loss_is_the_mean_over_the_examples_of_the_last_epoch():
    for state in run(*[1] * STEPS):
        if state.step != 12:
            assert state.train_loss == pytest.approx(expected(state.step), rel=1e-12)


@pytest.mark.parametrize("calls", [(23,), (4, 19), (5, 5, 13), (10, 12, 1), (3, 1, 7, 2, 10)])
def test_it_has_the_same_bits_however_many_steps_a_call_has(calls):
    state = run(*calls)[-1]
    assert (state.step, state.skipped) == (STEPS, 1)
    assert state.train_loss == run(*[1] * STEPS)[-1].train_loss


@pytest.mark.parametrize("calls", [(1,) * STEPS, (23,), (4, 19), (3, 1, 7, 2, 10)])
def test_running_results_are_those_of_one_interval(calls):
    """After every call, and with the same bits however many steps it has."""
    generator = np.random.default_rng(0)
    losses, counts = generator.uniform(0.1, 3.0, STEPS), generator.integers(1, 9, STEPS).astype(np.float64)
    applied = np.arange(STEPS) != 11
    losses[11], counts[5] = np.nan, 0.0

    def named(sums):
        return {"seen": float(sums[0]), "rows": sums[1].tolist()}

    def part(first: int, last: int) -> Interval:
        taken = slice(first, last)
        sums = [counts[taken].sum(), np.outer(counts[taken], [1.0, 2.0]).sum(axis=0)]
        return Interval(losses[taken], counts[taken], applied[taken], sums, named)

    running, by_step, step = RunningResults(named), RunningResults(named), 0
    assert list(running.results()) == ["loss"]
    assert np.isnan(running.results()["loss"])
    for call in calls:
        running.add(part(step, step + call))
        for each in range(step, step + call):
            by_step.add(part(each, each + 1))
        running.add(Interval(np.zeros(0), np.zeros(0), np.zeros(0, bool)))
        step += call
        whole = part(0, step).results()
        assert running.results() == by_step.results() == whole | {"loss": pytest.approx(whole["loss"], rel=1e-12)}


def test_there_is_none_where_no_step_of_the_epoch_was_applied():
    none = Interval(np.full(3, np.nan), np.full(3, 8.0), np.zeros(3, bool))
    assert LoopState(5, 9, loss_sum=1.0, loss_count=8).advanced(none, steps_per_epoch=5).train_loss is None


def test_an_unknown_attribute_is_named_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"'lr_multiplyer' is not known\. Did you mean 'lr_multiplier'"):
        LoopState(1, 2).replace(lr_multiplyer=0.5)


@pytest.mark.parametrize("calls", [(10,), (1, 9), (1,) * 10])
def test_weights_of_examples_need_not_be_whole_numbers(calls):
    state = LoopState(0, 100)
    for steps in calls:
        state = state.advanced(Interval(np.ones(steps), np.full(steps, 1.4), np.ones(steps, bool)), steps_per_epoch=100)
    assert (state.loss_count, state.train_loss) == (pytest.approx(14.0), pytest.approx(1.0))
    assert (
        state.loss_count
        == LoopState(0, 100)
        .advanced(Interval(np.ones(10), np.full(10, 1.4), np.ones(10, bool)), steps_per_epoch=100)
        .loss_count
    )


@pytest.mark.parametrize("calls", [(8,), (1,) * 8, (5, 3)])
def test_the_training_loss_is_over_the_steps_since_the_first_of_a_pass(calls):
    """A pass of eight steps that begins after five others."""
    losses, state = np.arange(8.0, 0.0, -1.0), LoopState(5, 13, loss_sum=180.0, loss_count=20.0)
    for steps in calls:
        part = losses[state.step - 5 :][:steps]
        state = state.advanced(
            Interval(part, np.full(steps, 4.0), np.ones(steps, bool)), steps_per_epoch=8, first_step=5
        )
    assert state.train_loss == np.mean(losses)


def test_steps_without_examples_are_not_skipped_for_not_being_finite():
    steps = Interval(np.array([np.nan, np.nan, 1.0]), np.array([4.0, 0.0, 4.0]), np.array([False, False, True]))
    assert steps.skipped.tolist() == [True, False, False]
    assert LoopState(0, 9).advanced(steps, steps_per_epoch=9).skipped == 1


def test_an_applied_step_without_a_loss_leaves_means_as_they_are():
    steps = Interval(np.array([2.0, np.nan]), np.array([4.0, 1e-6]), np.ones(2, bool))
    assert steps.results() == {"loss": 2.0}
    state = LoopState(0, 9).advanced(steps, steps_per_epoch=9)
    assert (state.loss_sum, state.loss_count, state.skipped) == (8.0, 4.0, 0)

"""Reports of workers that train by themselves, put together."""

from __future__ import annotations

from tfpar.training.loops.joined_reports import joined_reports
from tfpar.training.loops.state import Interval
from tfpar.training.loops.timed_rounds import OwnSteps, joined_steps

import numpy as np


class Gathers:
    """Two workers, of which one is not there."""

    def __init__(self, other: np.ndarray) -> None:
        self.other = other

    def gather_arrays(self, array):
        assert array.shape == self.other.shape
        return [array, self.other]


def test_losses_are_means_over_what_was_applied():
    own = Interval(
        np.array([2.0, np.nan, 1.0, np.nan]),
        np.array([6.0, 4.0, 5.0, 0.0]),
        np.array([True, False, True, False]),
        [np.array([[1.0, 2.0]])],
    )
    # Of the other: number, losses, counts, loss counts, applied, metric sums.
    other = [7.0, *(5.0, 3.0, 9.0, np.nan), *(2.0, 8.0, 0.0, 0.0), *(2.0, 8.0, 0.0, 0.0), *(1, 1, 0, 0), *(10.0, 20.0)]
    joined, rows, weights = joined_reports(own, own.counts, np.array([3.0]), Gathers(np.array(other)))
    np.testing.assert_array_equal(weights, [6.0 + 5.0, 2.0 + 8.0])
    np.testing.assert_array_equal(rows, [[3.0], [7.0]])
    np.testing.assert_allclose(joined.losses, [(6 * 2 + 2 * 5) / 8, 3.0, 1.0, np.nan])
    np.testing.assert_array_equal(joined.counts, [8.0, 12.0, 5.0, 0.0])
    np.testing.assert_array_equal(joined.applied, [True, False, True, False])
    np.testing.assert_array_equal(joined.metric_sums[0], [[11.0, 22.0]])


def test_steps_of_a_timed_round_that_were_not_finite_keep_their_examples():
    """Which tell them from steps without examples."""
    done = Interval(np.array([np.nan, 2.0]), np.array([4.0, 6.0]), np.array([False, True]))
    own = OwnSteps(done, done.counts, np.zeros([2, 6]), last=None)
    # Of the other: its number, steps, loss, weight, examples of applied steps and of others, number of these others.
    other = [7.0, *(2.0, 8.0, 2.0, 2.0, 3.0, 1.0)]
    joined, _, _ = joined_steps(own, np.array([3.0]), lambda taken: int(taken.sum()), Gathers(np.array(other)))
    np.testing.assert_array_equal(joined.skipped, [True, True, False, False])
    np.testing.assert_array_equal(joined.counts, [3.5, 3.5, 4.0, 4.0])
    np.testing.assert_allclose(joined.losses[2:], (6 * 2.0 + 8.0) / 8)
    none = Interval(np.full(2, np.nan), np.zeros(2), np.zeros(2, bool))
    own = OwnSteps(none, none.counts, np.zeros([2, 6]), last=None)
    joined, _, _ = joined_steps(
        own, np.array([3.0]), lambda taken: int(taken.sum()), Gathers(np.array([7.0, 2.0, *[0.0] * 5]))
    )
    assert not joined.skipped.any()
    assert not joined.applied.any()

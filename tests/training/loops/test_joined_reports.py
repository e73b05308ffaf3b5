"""Reports of workers that train by themselves, put together."""

from __future__ import annotations

from tfpar.training.loops.joined_reports import joined_reports
from tfpar.training.loops.state import Interval

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

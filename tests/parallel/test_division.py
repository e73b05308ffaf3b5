"""Parts of a weight that is divided, and whole again when they are joined."""

from __future__ import annotations

import math

from tfpar.parallel.division import FlatSplit, Split

import numpy as np
import pytest


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_parts_are_joined(size):
    whole = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4)
    split = FlatSplit(whole.shape, size)
    parts = [split.part(whole, rank) for rank in range(size)]
    assert {part.shape for part in parts} == {(split.elements,)}
    assert split.whole_shape(parts[0].shape) == whole.shape
    np.testing.assert_array_equal(split.joined(parts), whole)
    np.testing.assert_array_equal(split.joined_tensor(parts), whole)
    own = [part[: split.own_elements(rank)] for rank, part in enumerate(parts)]
    np.testing.assert_array_equal(np.concatenate(own), whole.reshape(-1))
    assert all(part.all() for part in parts)  # no zeros, of which an optimizer's state may not be made


@pytest.mark.parametrize(
    ("split", "shape"),
    [
        (Split(0, 2), (6, 3)),
        (Split(1, 2, groups=3), (2, 12)),
        (Split.padded(0, 4, 5), (5, 2)),  # the last device has nothing but padding
        (FlatSplit((5, 3), 4), (5, 3)),
    ],
)
def test_parts_are_placed_where_they_were(split, shape):
    expected = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    found = np.full(shape, np.nan, np.float32)
    for rank in range(split.size):
        split.place(found, rank, split.part(expected, rank))
    np.testing.assert_array_equal(found, expected)
    parts = [split.part(expected, rank) for rank in range(split.size)]
    np.testing.assert_array_equal(split.joined(parts), expected)
    own = [split.without_padding(part, rank, shape) for rank, part in enumerate(parts)]
    assert sum(part.size for part in own) == expected.size
    in_order = np.array_equal(np.concatenate([part.reshape(-1) for part in own]), expected.reshape(-1))
    assert split.in_order == in_order

"""Parts of a weight that is divided as a vector: of equal length, and whole again when they are joined."""

from __future__ import annotations

from tfpar.parallel.split import FlatSplit

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

"""Parts of a weight that is divided, and whole again when they are joined."""

from __future__ import annotations

import math

from tfpar.parallel.division import Shards, Split

import numpy as np
import pytest
import tensorflow as tf

COLUMNS = Split(1, 2)
QUERY_KEY_VALUE = Split(1, 2, groups=3)


@pytest.mark.parametrize(
    ("split", "shape"),
    [
        (Split(0, 2), (6, 3)),
        (QUERY_KEY_VALUE, (2, 12)),
        (Split.padded(0, 4, 5), (5, 2)),  # the last device has nothing but padding
        (Shards.of((6, 3), 2), (6, 3)),
        (Shards.of((3, 4), 2, devices=2), (3, 4)),
        (Shards.of((5, 3), 4), (5, 3)),
        (Shards.of((3, 8), 2, within=COLUMNS), (3, 8)),
        (Shards.of((4, 12), 3, within=QUERY_KEY_VALUE), (4, 12)),
        (Shards.of((7, 6), 3, within=Split.padded(0, 4, 7)), (7, 6)),
        (Shards.of((3, 3, 2, 8), 5, within=Split(3, 4)), (3, 3, 2, 8)),
    ],
)
def test_parts_make_the_whole(split, shape):
    expected = np.arange(1.0, 1.0 + math.prod(shape), dtype=np.float32).reshape(shape)
    found = np.full(shape, np.nan, np.float32)
    parts = [split.part(expected, rank) for rank in range(split.size)]
    assert {part.shape for part in parts} == {split.part_shape(shape)}
    assert split.whole_shape(parts[0].shape) == shape
    for rank, part in enumerate(parts):
        split.place(found, rank, part)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(split.joined(parts), expected)
    if isinstance(split, Split):
        for tensor, part in zip(split.part_tensors(tf.constant(expected)), parts, strict=True):
            np.testing.assert_array_equal(tensor, part)
    np.testing.assert_array_equal(split.joined_tensor(parts), expected)
    own = [split.without_padding(part, rank, shape) for rank, part in enumerate(parts)]
    assert sum(part.size for part in own) == expected.size
    in_order = np.array_equal(np.concatenate([part.reshape(-1) for part in own]), expected.reshape(-1))
    assert split.in_order == in_order
    seen = np.zeros(shape, int)
    for rank, part in enumerate(own):
        lengths = {axis: sum(length for _, length in each) for axis, each in split.ranges(shape, rank).items()}
        assert part.shape == tuple(lengths.get(axis, length) for axis, length in enumerate(shape))
        indices = [np.arange(length) for length in shape]
        for axis, each in split.ranges(shape, rank).items():
            indices[axis] = np.concatenate([np.arange(start, start + length) for start, length in each])
        np.testing.assert_array_equal(part, expected[np.ix_(*indices)])
        seen[np.ix_(*indices)] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("split", [Shards.of((5, 3), 4), Shards.of((7, 6), 4, within=Split.padded(0, 4, 7))])
def test_padding_has_its_value(split):
    """Of which an optimizer's state is made: zeros would divide by zero."""
    whole = np.arange(1.0, 1.0 + math.prod(split.shape)).reshape(split.shape)
    parts = [split.filled(0.5).part(whole, rank) for rank in range(split.size)]
    padding = sum(part.size for part in parts) - whole.size
    assert padding > 0
    assert sum(int((part == 0.5).sum()) for part in parts) == padding
    own = split.without_padding(parts[-1], split.size - 1, whole.shape)
    np.testing.assert_array_equal(split.filled(0.5).with_padding(own, parts[-1].shape), parts[-1])


def test_devices_have_the_part_of_their_rank():
    divided = Shards.of((4, 8), 2, devices=2, within=Split(1, 2))
    assert [divided.rank_of(device) for device in range(4)] == [0, 1, 2, 3]
    copied = Shards.of((4, 8), 2, devices=2)  # the model axis does not divide it
    assert [copied.rank_of(device) for device in range(4)] == [0, 0, 1, 1]
    assert [copied.is_first(device) for device in range(4)] == [True, False, True, False]
    assert [Split(0, 2).is_first(device) for device in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("shape", "replicas", "within", "axis"),
    [
        ((50257, 768), 4, None, 0),  # three rows of padding are few
        ((3, 3, 16, 32), 4, None, 2),
        ((3, 3, 16, 32), 4, Split(2, 2), 3),
        ((64, 4, 16), 8, Split(1, 2), 0),
    ],
)
def test_shards_are_cut_where_little_is_padded(shape, replicas, within, axis):
    assert Shards.of(shape, replicas, within=within).split.axis == axis

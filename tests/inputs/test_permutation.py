"""The order of an epoch: a bijection, uniform, and fixed forever."""

from __future__ import annotations

import itertools
import math

from tfpar.inputs import permutation

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

MASK = (1 << 64) - 1


def permute_all(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permutation.permute(tf.range(size, dtype=tf.int64), size, seed, tf.constant(epoch, tf.int64)).numpy()


def oracle(index: int, size: int, seed: int, epoch: int) -> int:
    """The definition in Python integers, one index at a time."""
    golden = 0x9E3779B97F4A7C15
    base = permutation.mix64(seed)
    keys = [permutation.mix64(base + (epoch * permutation.ROUNDS + n + 1) * golden) for n in range(permutation.ROUNDS)]
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        left, right = divmod(index, columns)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + (permutation.mix64(right * golden + key) >> 32)) % rows
            else:
                right = (right + (permutation.mix64(left * golden + key) >> 32)) % columns
        index = left * columns + right
        if index < size:
            return index


# At sizes 65,537 and 262,145 tf.random.experimental.index_shuffle returns duplicates (TensorFlow 2.21).
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 10, 17, 256, 1797, 65_536, 65_537, 262_145])
def test_every_index_occurs_once(size):
    assert np.array_equal(np.sort(permute_all(size, seed=5, epoch=3)), np.arange(size))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 10**12),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 2**40),
    data=st.data(),
)
def test_the_graph_agrees_with_the_definition(size, seed, epoch, data):
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    got = permutation.permute(tf.constant(indices, tf.int64), size, seed, tf.constant(epoch, tf.int64))
    assert got.numpy().tolist() == [oracle(index, size, seed, epoch) for index in indices]


def test_the_order_never_changes():
    """A run that resumes with a newer tfpar must continue in the same order."""
    assert permute_all(10, seed=0, epoch=0).tolist() == [4, 0, 7, 2, 5, 3, 9, 8, 6, 1]
    assert permute_all(1797, seed=1, epoch=2)[:8].tolist() == [1273, 648, 139, 272, 183, 1298, 525, 614]


def test_epochs_and_seeds_have_different_orders():
    index = tf.broadcast_to(tf.range(50, dtype=tf.int64), [600, 50])
    epochs = set(map(bytes, permutation.permute(index, 50, 0, tf.range(600, dtype=tf.int64)[:, None]).numpy()))
    seeds = {permute_all(50, seed=seed, epoch=0).tobytes() for seed in (0, 1, 256, 2**32, 2**48)}
    assert len(epochs) == 600
    assert len(seeds) == 5


@pytest.mark.parametrize("size", [97, 1437])
def test_positions_and_neighbours_are_uniform(size):
    """Chi-square per degree of freedom of the positions of items, and of distances of neighbours, over 400 epochs."""
    epochs = tf.range(400, dtype=tf.int64)[:, None]
    index = tf.broadcast_to(tf.range(size, dtype=tf.int64), [400, size])
    orders = permutation.permute(index, size, 7, epochs).numpy()
    bins = 8
    expected = 400 * np.bincount(np.arange(size) * bins // size) / size
    counts = np.stack([(orders * bins // size == b).sum(0) for b in range(bins)], axis=1)
    places = ((counts - expected) ** 2 / expected).sum() / (size * (bins - 1))
    assert places == pytest.approx(1.0, abs=6 * math.sqrt(2 / (size * (bins - 1))))
    distances = np.bincount((np.diff(orders, axis=1) % size).ravel(), minlength=size)[1:]
    neighbours = ((distances - 400) ** 2 / 400).sum() / (size - 2)
    assert neighbours == pytest.approx(1.0, abs=6 * math.sqrt(2 / (size - 2)))
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in itertools.pairwise(orders)]
    assert np.std(correlation) * math.sqrt(size) == pytest.approx(1.0, abs=0.2)


def test_hash_agrees_with_python():
    values = [0, 1, 12345, 2**63, MASK]
    got = permutation.hash64(tf.constant(values, tf.uint64)).numpy().tolist()
    assert got == [permutation.mix64(value) for value in values]
    # First output of the published SplitMix64 generator seeded with 0.
    assert permutation.mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF

"""Which worker owns what: every element once, shards of equal size, and state put together again."""

from __future__ import annotations

from tfpar.exchange.sharding.shards import ShardedVector, by_tensor, evenly, joined, runs_of

import numpy as np
import pytest

SIZES = [7, 4000, 64, 1, 900, 2500]


def owners(vectors: list[ShardedVector], count: int) -> list[np.ndarray]:
    """For each tensor, how many replicas own each element."""
    counts = [np.zeros(size, int) for size in SIZES]
    for vector in vectors:
        for rank in range(count):
            assert sum(piece.size for piece in vector.pieces(rank)) <= vector.shard_elements
            for piece in vector.pieces(rank):
                counts[piece.index][piece.begin : piece.end] += 1
    return counts


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("block", [1, 64])
def test_every_element_has_one_owner(workers, block):
    indices = [0, 1, 2, 4, 5]
    even = evenly(indices, SIZES, workers, block=block, bucket_bytes=4 * 5000)
    assert [vector.indices for vector in even] == [[0, 1, 2, 4], [5]]
    whole = by_tensor(indices, SIZES, workers, block=block)
    for vectors in (even, whole):
        counts = owners(vectors, workers)
        assert all((counts[index] == 1).all() for index in indices)
        assert not counts[3].any()
        for vector in vectors:
            assert not vector.shard_elements % block
            assert sum(size for _, size in vector.segments) == workers * vector.shard_elements
    assert {(piece.begin, piece.size) for rank in range(workers) for piece in whole[0].pieces(rank)} == {
        (0, SIZES[index]) for index in indices
    }


def test_replicas_of_a_worker_have_neighbouring_shards():
    [vector] = evenly([1, 5], SIZES, 4, block=16, bucket_bytes=1 << 20, per_worker=2)
    assert (vector.workers, vector.worker_elements) == (2, 2 * vector.shard_elements)


def test_even_shards_differ_by_less_than_a_block():
    [vector] = evenly([1, 5], SIZES, 3, block=16, bucket_bytes=1 << 20)
    assert [sum(piece.size for piece in vector.pieces(rank)) for rank in range(3)] == [2176, 2176, 2148]


def test_whole_tensors_go_to_whom_has_least():
    [vector] = by_tensor(range(6), SIZES, 2, block=1)
    assert [[piece.index for piece in vector.pieces(rank)] for rank in range(2)] == [[1], [0, 2, 3, 4, 5]]
    assert vector.shard_elements == 4000


def test_vectors_keep_their_elements_in_another_order():
    [vector] = by_tensor([1, 2, 5], SIZES, 2, block=64)
    plain = np.arange(vector.elements, dtype=np.float32)
    sizes = [SIZES[index] for index in (1, 2, 5)]
    parts = dict(zip((1, 2, 5), np.split(plain, np.cumsum(sizes)[:-1]), strict=True))
    padded = vector.from_parts(parts)
    assert padded.size == 2 * vector.shard_elements
    found = vector.parts(padded)
    assert {index: part.tolist() for index, part in found.items()} == {i: part.tolist() for i, part in parts.items()}


def test_runs_are_in_the_order_of_the_tensors():
    """As where a model axis divides some of them, which then have a vector of their own."""
    vectors = [*by_tensor([2, 5], SIZES, 2, block=1), *by_tensor([0, 1, 4], SIZES, 2, block=1)]
    assert runs_of(vectors) == [(1, [0, 1]), (0, [2]), (1, [4]), (0, [5])]
    assert runs_of([]) == []


def test_pieces_are_joined():
    whole = np.arange(12.0).reshape(3, 4)
    parts = {5: whole.reshape(-1)[5:], 0: whole.reshape(-1)[:5]}
    np.testing.assert_array_equal(joined(parts, (3, 4)), whole)
    assert joined({0: np.zeros(3)}, (3, 4)).shape == (3,)  # Adafactor keeps rows and columns


def test_no_tensors():
    assert by_tensor([], [], 2, block=1) == evenly([], [], 2, block=1, bucket_bytes=1) == []

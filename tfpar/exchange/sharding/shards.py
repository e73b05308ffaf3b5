"""Assigns weights to replicas, each of which updates only its own share (ZeRO, Rajbhandari et al. 2020).

Tensors are joined end to end in a vector that is cut into as many shards as there are replicas, S elements each.
Replica r owns shard r: only it updates these weights. Shards of one worker's replicas are adjacent; only this worker
has the sum of their gradients. Plain Python and NumPy: no tensor is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from tfpar.exchange.fusion import group_indices

import numpy as np


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive elements of one tensor that one replica owns.

    Attributes:
      index: Which tensor.
      begin: First element, of the tensor seen as a vector.
      end: The element after the last one.
    """

    index: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class ShardedVector:
    """Tensors end to end, in shards of S elements.

    Attributes:
      owners: Number of shards, one per replica.
      shard_elements: S; a multiple of the block of the codec.
      segments: The contents of the vector, in order: index of a tensor, or -1 for padding, and number of elements.
      per_worker: Replicas of a worker.
      exact: Whether no codec encodes it.
    """

    owners: int
    shard_elements: int
    segments: tuple[tuple[int, int], ...]
    per_worker: int = 1
    exact: bool = False

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.owners // self.per_worker

    @property
    def worker_elements(self) -> int:
        """Elements of all shards of one worker, padding included."""
        return self.per_worker * self.shard_elements

    @property
    def indices(self) -> list[int]:
        """The tensors, in their order in the vector."""
        return [index for index, _ in self.segments if index >= 0]

    @property
    def elements(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(size for index, size in self.segments if index >= 0)

    def pieces(self, owner: int) -> list[Piece]:
        """The pieces that a replica owns, in their order in its shard."""
        first, last = owner * self.shard_elements, (owner + 1) * self.shard_elements
        found, place = [], 0
        for index, size in self.segments:
            begin, end = max(first - place, 0), min(last - place, size)
            if index >= 0 and begin < end:
                found.append(Piece(index, begin, end))
            place += size
        return found

    def parts(self, vector: np.ndarray) -> dict[int, np.ndarray]:
        """The elements of each tensor by its index, from a vector like this one."""
        parts, place = {}, 0
        for index, size in self.segments:
            if index >= 0:
                parts[index] = vector[place : place + size]
            place += size
        return parts

    def from_parts(self, parts: Mapping[int, np.ndarray]) -> np.ndarray:
        """The inverse of `parts`, which may be of other tensors, too; float32, with zeros in place of padding."""
        return np.concatenate(
            [parts[index] if index >= 0 else np.zeros(size) for index, size in self.segments], dtype=np.float32
        )


def evenly(
    indices: Sequence[int],
    sizes: Sequence[int],
    owners: int,
    *,
    block: int,
    bucket_bytes: int,
    per_worker: int = 1,
    exact: bool = False,
) -> list[ShardedVector]:
    """Buckets of consecutive tensors, each cut into equal shards, also within tensors.

    For elementwise optimizers.

    Args:
      indices: Which tensors.
      sizes: Elements of every tensor.
      owners: Number of replicas.
      block: Elements of a block of the codec, in whole numbers of which a shard is.
      bucket_bytes: Tensors share a bucket up to this many bytes of float32.
      per_worker: Replicas of a worker.
      exact: Whether no codec encodes them.
    """
    vectors = []
    for group in group_indices(indices, sizes, bucket_bytes):
        if group:
            elements = sum(sizes[index] for index in group)
            shard = -(-math.ceil(elements / block) // owners) * block
            padding = owners * shard - elements
            segments = [(index, sizes[index]) for index in group] + ([(-1, padding)] if padding else [])
            vectors.append(ShardedVector(owners, shard, tuple(segments), per_worker, exact))
    return vectors


def by_tensor(
    indices: Sequence[int], sizes: Sequence[int], owners: int, *, block: int, per_worker: int = 1, exact: bool = False
) -> list[ShardedVector]:
    """One bucket in which every replica owns whole tensors; assigns the largest first, each to the replica with the
    least.

    For optimizers that need whole tensors (LAMB, LARS, Muon, Adafactor). Shards are as large as the largest one, so
    a tensor that is larger than all others together costs padding on the wire.

    Args:
      indices: Which tensors.
      sizes: Elements of every tensor.
      owners: Number of replicas.
      block: Elements of a block of the codec, in whole numbers of which a shard is.
      per_worker: Replicas of a worker.
      exact: Whether no codec encodes them.
    """
    owned: list[list[int]] = [[] for _ in range(owners)]
    filled = [0] * owners
    for index in sorted(indices, key=lambda each: (-sizes[each], each)):
        rank = filled.index(min(filled))
        owned[rank].append(index)
        filled[rank] += sizes[index]
    if not indices:
        return []
    shard = -(-max(filled) // block) * block
    segments: list[tuple[int, int]] = []
    for mine, used in zip(owned, filled, strict=True):
        segments += [(index, sizes[index]) for index in sorted(mine)]
        if used < shard:
            segments.append((-1, shard - used))
    return [ShardedVector(owners, shard, tuple(segments), per_worker, exact)]


def runs_of(vectors: Sequence[ShardedVector]) -> list[tuple[int, list[int]]]:
    """All tensors in the order of their indices: for each run of those in the same vector, its number and the tensors.

    The tensors of a vector need not be consecutive, see `by_tensor`.
    """
    numbers = {index: number for number, vector in enumerate(vectors) for index in vector.indices}
    return [(number, [*run]) for number, run in itertools.groupby(sorted(numbers), key=numbers.__getitem__)]


def joined(parts: Mapping[int, np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """A whole array, joined from its pieces.

    Args:
      parts: Arrays by the index of their first element.
      shape: Shape of the tensor that the pieces are of. State of another size, such as Adafactor's, keeps its own.
    """
    pieces = [parts[begin] for begin in sorted(parts)]
    whole = pieces[0] if len(pieces) == 1 else np.concatenate([piece.reshape(-1) for piece in pieces])
    return whole.reshape(shape) if whole.size == math.prod(shape) else whole

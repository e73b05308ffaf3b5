"""The message plans of patterns with messages between two workers: which worker sends which shards to which other, and
when.

A vector is cut into shards. In the rounds of `reduce` a worker sends partial sums of a range of shards and discards
them; in the end each shard has one owner with its full sum. In the rounds of `gather` the encoded sums travel back to
all. Plain Python, so that tests run the plans of any number of workers, and the cost model adds up their bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A message of one round.

    Attributes:
      source: Rank of the sender.
      target: Rank of the receiver.
      first: First shard of the range.
      last: The shard after the last one.
    """

    source: int
    target: int
    first: int
    last: int

    @property
    def shards(self) -> int:
        """Number of shards that travel."""
        return self.last - self.first


Round = tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True)
class MessagePlan:
    """A pattern for a number of workers.

    Attributes:
      workers: Number of workers N.
      shards: Number of shards that the vector is cut into.
      owners: Rank of the owner of each shard.
      reduce: Rounds of partial sums. A worker discards the shards that it sends, and adds those that it receives to its
        own.
      gather: Rounds of encoded sums.
    """

    workers: int
    shards: int
    owners: tuple[int, ...]
    reduce: tuple[Round, ...]
    gather: tuple[Round, ...]

    def sent_shards(self, rank: int) -> int:
        """Shards that a worker sends in all rounds."""
        return sum(move.shards for phase in (*self.reduce, *self.gather) for move in phase if move.source == rank)

    def critical_shards(self) -> int:
        """Sum over rounds of the largest number of shards that one worker sends or receives: determines the time of a
        link."""
        total = 0
        for phase in (*self.reduce, *self.gather):
            sent = [sum(move.shards for move in phase if move.source == rank) for rank in range(self.workers)]
            received = [sum(move.shards for move in phase if move.target == rank) for rank in range(self.workers)]
            total += max(*sent, *received)
        return total


def ring(workers: int) -> MessagePlan:
    """Each shard travels around the ring once for summing, and once more for distributing the sum (Patarasuk and Yuan
    2009).

    2 (N - 1) rounds, in each of which every worker sends one shard of N to its neighbour.
    """

    def step(offset: int) -> Round:
        return tuple(
            Transfer(rank, (rank + 1) % workers, (rank + offset) % workers, (rank + offset) % workers + 1)
            for rank in range(workers)
        )

    return MessagePlan(
        workers,
        workers,
        tuple((shard - 1) % workers for shard in range(workers)),
        tuple(step(-hop) for hop in range(workers - 1)),
        tuple(step(1 - hop) for hop in range(workers - 1)),
    )


def halving_doubling(workers: int) -> MessagePlan:
    """Recursive halving, then recursive doubling (Thakur, Rabenseifner and Gropp 2005).

    2 log2 N rounds: a worker sends half of what it still has to a partner, a quarter in the next, and so on.

    Raises:
      ValueError: The number of workers is not a power of two.
    """
    if workers & (workers - 1):
        raise ValueError(f"halving_doubling needs a power of two, not {workers} workers")
    return binary_blocks(workers)


def binary_blocks(workers: int) -> MessagePlan:
    """Recursive halving in blocks of powers of two, where smaller blocks pass their sums to larger ones (Rabenseifner
    2004).

    N is the sum of distinct powers of two, one block for each. Every block first halves separately; then, starting with
    the smallest, each block sends its members' sums to the next larger block, which sends the final sums back. A power
    of two is a single block, and the pattern is recursive halving and doubling.
    """
    sizes = [1 << bit for bit in reversed(range(workers.bit_length())) if workers >> bit & 1]
    first_ranks = [sum(sizes[:number]) for number in range(len(sizes))]
    shards = sizes[0]

    def owned(block: int, member: int) -> tuple[int, int]:
        """The range that a member has after the halving of its block."""
        share = shards // sizes[block]
        return member * share, (member + 1) * share

    halving: list[list[Transfer]] = []
    for block, size in enumerate(sizes):
        distance, number = size // 2, 0
        while distance:
            while len(halving) <= number:
                halving.append([])
            share = shards // size * distance  # the range that each keeps in this round
            for member in range(size):
                partner = member ^ distance
                begin = partner // distance * share  # the half that contains the partner's final range
                halving[number].append(
                    Transfer(first_ranks[block] + member, first_ranks[block] + partner, begin, begin + share)
                )
            distance, number = distance // 2, number + 1
    # From a block to the next larger one: each member of the larger receives its range from the member that has it.
    handing_on = []
    for block in reversed(range(1, len(sizes))):
        ratio = sizes[block - 1] // sizes[block]
        handing_on.append(
            tuple(
                Transfer(
                    first_ranks[block] + member // ratio, first_ranks[block - 1] + member, *owned(block - 1, member)
                )
                for member in range(sizes[block - 1])
            )
        )
    reduce = (*(tuple(phase) for phase in halving), *handing_on)
    return MessagePlan(workers, shards, tuple(range(shards)), reduce, _reversed(reduce))


def _reversed(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """The same messages in reverse: the sums come back."""
    return tuple(
        tuple(Transfer(move.target, move.source, move.first, move.last) for move in phase) for phase in reversed(rounds)
    )


PLANS = {"ring": ring, "halving_doubling": halving_doubling, "binary_blocks": binary_blocks}

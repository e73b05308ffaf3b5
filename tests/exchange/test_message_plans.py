"""Message plans, played through for any number of workers."""

from __future__ import annotations

from tfpar.exchange.algorithms import message_plans
from tfpar.exchange.algorithms.message_plans import MessagePlan

import numpy as np
import pytest

SIZES = [*range(1, 34), 48, 63, 64, 65, 100]


def play(plan: MessagePlan) -> list[int]:
    """Runs a plan on integers, checks that all workers end with all sums, and returns the shards that each sent."""
    workers, shards = plan.workers, plan.shards
    values = np.random.default_rng(workers).integers(0, 1000, [workers, shards])
    held = {(rank, shard): int(values[rank, shard]) for rank in range(workers) for shard in range(shards)}
    sent = [0] * workers
    for phase in plan.reduce:
        arriving = []
        for move in phase:
            for shard in range(move.first, move.last):
                arriving.append((move.target, shard, held.pop((move.source, shard))))  # KeyError: sent twice
                sent[move.source] += 1
        for target, shard, value in arriving:
            held[target, shard] += value  # KeyError: it had sent that away
    assert set(held) == {(owner, shard) for shard, owner in enumerate(plan.owners)}
    for phase in plan.gather:
        arriving = []
        for move in phase:
            for shard in range(move.first, move.last):
                arriving.append((move.target, shard, held[move.source, shard]))
                sent[move.source] += 1
        for target, shard, value in arriving:
            assert (target, shard) not in held, "nothing arrives twice"
            held[target, shard] = value
    for rank in range(workers):
        assert [held[rank, shard] for shard in range(shards)] == values.sum(axis=0).tolist()
    return sent


@pytest.mark.parametrize("workers", SIZES)
@pytest.mark.parametrize("name", ["ring", "binary_blocks"])
def test_every_worker_ends_with_every_sum(name, workers):
    plan = message_plans.PLANS[name](workers)
    sent = play(plan)
    assert sent == [plan.sent_shards(rank) for rank in range(workers)]
    if name == "ring":
        assert sent == [2 * (workers - 1)] * workers  # shards of 1 / N


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 32, 64])
def test_halving_doubling(workers):
    plan = message_plans.halving_doubling(workers)
    assert play(plan) == [2 * (workers - 1)] * workers
    assert len(plan.reduce) == len(plan.gather) == workers.bit_length() - 1
    assert plan.critical_shards() == 2 * (workers - 1)


@pytest.mark.parametrize("workers", [3, 5, 6, 7, 12])
def test_halving_doubling_wants_a_power_of_two(workers):
    with pytest.raises(ValueError, match=f"{workers} workers"):
        message_plans.halving_doubling(workers)


@pytest.mark.parametrize(("workers", "count"), [(3, 2), (5, 3), (6, 3), (7, 4)])
def test_rounds_of_binary_blocks(workers, count):
    """log2 of the largest block, and one for each further block."""
    assert len(message_plans.binary_blocks(workers).reduce) == count

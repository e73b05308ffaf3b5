"""The order in which the workers of a pipeline take their passes."""

from __future__ import annotations

from tfpar.training.pipeline.between_workers import BACKWARD, FORWARD, turns

import pytest


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe"])
@pytest.mark.parametrize("workers", [2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_no_two_workers_wait_for_each_other(workers, micro_batches, schedule):
    """Each takes every pass once, and at any time somebody can take the next."""
    orders = [turns(place, workers, micro_batches, schedule) for place in range(workers)]
    for order in orders:
        assert sorted(order) == sorted(
            (turn, number) for turn in (FORWARD, BACKWARD) for number in range(micro_batches)
        )
    done: set[tuple[int, str, int]] = set()
    positions = [0] * workers
    while any(position < 2 * micro_batches for position in positions):
        before = list(positions)
        for place in range(workers):
            while positions[place] < 2 * micro_batches:
                turn, number = orders[place][positions[place]]
                neighbour = place - 1 if turn == FORWARD else place + 1
                if turn == BACKWARD and (place, FORWARD, number) not in done:
                    break
                if 0 <= neighbour < workers and (neighbour, turn, number) not in done:
                    break
                done.add((place, turn, number))
                positions[place] += 1
        assert positions != before, "all wait"


def test_1f1b_keeps_as_many_micro_batches_as_workers_follow():
    assert turns(0, 3, 4, "1f1b")[:4] == [(FORWARD, 0), (FORWARD, 1), (FORWARD, 2), (BACKWARD, 0)]
    for place in range(4):
        ahead = most = 0
        for turn, _ in turns(place, 4, 10, "1f1b"):
            ahead += 1 if turn == FORWARD else -1
            most = max(most, ahead)
        assert most == 4 - place
    assert turns(1, 3, 9, "eager_1f1b")[:5] == [
        *((FORWARD, number) for number in range(3)),
        (BACKWARD, 0),
        (FORWARD, 3),
    ]
    assert [turn for turn, _ in turns(1, 4, 3, "gpipe")] == [FORWARD] * 3 + [BACKWARD] * 3

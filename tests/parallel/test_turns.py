"""The order in which the workers of a pipeline run their passes."""

from __future__ import annotations

from tfpar.parallel.pipeline.turns import BACKWARD, FORWARD, turns

import pytest


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe"])
@pytest.mark.parametrize("workers", [2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_no_two_workers_wait_for_each_other(workers, micro_batches, schedule, chunks):
    """Each runs every pass once, and at any time somebody can run the next."""
    orders = [turns(place, workers, micro_batches, schedule, chunks) for place in range(workers)]
    every = [
        (turn, number, chunk)
        for turn in (FORWARD, BACKWARD)
        for number in range(micro_batches)
        for chunk in range(chunks)
    ]
    for order in orders:
        assert sorted(order) == sorted(every)
    done: set[tuple[int, str, int]] = set()
    positions = [0] * workers
    while any(position < len(every) for position in positions):
        before = list(positions)
        for place in range(workers):
            while positions[place] < len(every):
                turn, number, chunk = orders[place][positions[place]]
                stage = chunk * workers + place
                neighbour = stage - 1 if turn == FORWARD else stage + 1
                if turn == BACKWARD and (stage, FORWARD, number) not in done:
                    break
                if 0 <= neighbour < workers * chunks and (neighbour, turn, number) not in done:
                    break
                done.add((stage, turn, number))
                positions[place] += 1
        assert positions != before, "all wait"


def test_1f1b_keeps_as_many_micro_batches_as_workers_follow():
    assert turns(0, 3, 4, "1f1b")[:4] == [(FORWARD, 0, 0), (FORWARD, 1, 0), (FORWARD, 2, 0), (BACKWARD, 0, 0)]
    for place in range(4):
        ahead = most = 0
        for turn, _, _ in turns(place, 4, 10, "1f1b"):
            ahead += 1 if turn == FORWARD else -1
            most = max(most, ahead)
        assert most == 4 - place
    assert turns(1, 3, 9, "eager_1f1b")[:5] == [
        *((FORWARD, number, 0) for number in range(3)),
        (BACKWARD, 0, 0),
        (FORWARD, 3, 0),
    ]
    assert [turn for turn, _, _ in turns(1, 4, 3, "gpipe")] == [FORWARD] * 3 + [BACKWARD] * 3


@pytest.mark.parametrize(("workers", "chunks"), [(2, 2), (4, 2), (3, 3)])
def test_chunks_fill_a_pipeline_faster(workers, chunks):
    """Passes of a chunk take 1 / chunks of the time: a step takes less than with whole stages, and no less than the
    bound of Narayanan et al., M + (S - 1) / V turns."""
    micro_batches = 4 * workers
    whole = _length(workers, micro_batches, 1)
    interleaved = _length(workers, micro_batches, chunks) / chunks
    assert whole == 3 * (micro_batches + workers - 1)
    assert 3 * (micro_batches + (workers - 1) / chunks) <= interleaved < whole


def _length(workers: int, micro_batches: int, chunks: int) -> int:
    """Returns how long a step takes if a forward pass takes 1 and a backward pass 2, without messages."""
    orders = [turns(place, workers, micro_batches, "1f1b", chunks) for place in range(workers)]
    ended: dict[tuple[str, int, int], int] = {}
    positions, free = [0] * workers, [0] * workers
    while any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        for place, order in enumerate(orders):
            if positions[place] == len(order):
                continue
            turn, number, chunk = order[positions[place]]
            stage = chunk * workers + place
            needed = [(FORWARD, number, stage)] if turn == BACKWARD else []
            neighbour = stage - 1 if turn == FORWARD else stage + 1
            if 0 <= neighbour < workers * chunks:
                needed.append((turn, number, neighbour))
            if all(each in ended for each in needed):
                start = max([free[place], *(ended[each] for each in needed)])
                free[place] = ended[turn, number, stage] = start + (1 if turn == FORWARD else 2)
                positions[place] += 1
    return max(free)

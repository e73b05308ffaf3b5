"""Where a model is cut into stages."""

from __future__ import annotations

from tfpar.parallel.pipeline.cuts import cut_evenly, micro_batches_in_flight

import pytest


@pytest.mark.parametrize(
    ("costs", "crossing", "stages", "cuts"),
    [
        ([1, 1, 1, 1], [0, 5, 5, 5], 2, [2]),
        ([10, 10, 10, 10], [0, 1, 9, 1], 2, [2]),  # balance comes first
        ([10, 10, 1, 10, 10], [0, 5, 9, 1, 9], 2, [3]),  # about as even, and less crosses
        ([1, 8, 1, 8, 1], [0, 1, 1, 1, 1], 3, [1, 3]),
        ([0, 1, 1], [0, 1, 1], 3, None),  # a stage without any cost is none
        ([1, 1, 1], [0, -1, 1], 3, None),
    ],
)
def test_even_cuts(costs, crossing, stages, cuts):
    assert cut_evenly(costs, crossing.__getitem__, stages) == cuts


def test_cuts_by_weights():
    """As in a language model with a table that is also its head: a stage that has it, has little else."""
    costs, crossing = [1, 10, 10, 10, 10, 20], [0, 1, 1, 1, 1, 1]
    table = {0: 40}
    weights = [table, *({number: 10} for number in range(1, 5)), table]
    assert cut_evenly(costs, crossing.__getitem__, 3) == [3, 5]
    assert cut_evenly(costs, crossing.__getitem__, 3, weights) == [1, 5]
    # Of cuts that leave the largest stage as large, the one of equal costs.
    assert cut_evenly([1, 9, 5, 5], crossing.__getitem__, 2, [{0: 30}, {}, {}, {1: 30}]) == [2]


class Counted(dict):
    """Sizes of weights, which count how often they are read."""

    reads = 0

    def items(self):
        Counted.reads += 1
        return super().items()


def test_cuts_of_many_layers_read_each_a_few_times():
    """Not for each pair of layers, which takes seconds with some hundreds of them."""
    layers, asked = 200, []

    def crossing(step: int) -> int:
        asked.append(step)
        return 5

    Counted.reads = 0
    sizes = [Counted({step: 10, layers: 40}) if step in (0, layers - 1) else Counted({step: 10}) for step in range(200)]
    assert cut_evenly([1] * layers, crossing, 4, sizes) == [49, 100, 151]
    assert max(Counted.reads, len(asked)) <= 4 * layers


def test_micro_batches_in_flight():
    """As many as it takes to come back, with 1F1B; the last stage turns round at once."""
    assert [micro_batches_in_flight(stage, 4, 4, "1f1b") for stage in range(4)] == [4, 3, 2, 1]
    assert [micro_batches_in_flight(stage, 4, 2, "1f1b") for stage in range(4)] == [3, 3, 2, 2]
    assert [micro_batches_in_flight(stage, 4, 4, "eager_1f1b") for stage in range(4)] == [7, 5, 3, 1]
    assert [micro_batches_in_flight(stage, 4, 2, "eager_1f1b") for stage in range(4)] == [5, 4, 3, 2]
    assert micro_batches_in_flight(0, 4, 4, "gpipe") is None

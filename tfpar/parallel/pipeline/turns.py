"""The order in which the workers of a pipeline run their passes."""

from __future__ import annotations

from tfpar.parallel.pipeline.cuts import EAGER, GPIPE, micro_batches_in_flight

FORWARD, BACKWARD = "forward", "backward"

# FORWARD or BACKWARD; number of the micro-batch; index of the chunk among those of the worker.
Turn = tuple[str, int, int]


def turns(place: int, workers: int, micro_batches: int, schedule: str, chunks: int = 1) -> list[Turn]:
    """Returns the order in which a worker runs its passes, one at a time.

    1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): one forward pass, and one more for each later worker;
    then backward and forward alternately. Eager 1F1B (Zhuang et al. 2022, arXiv:2211.05322): two more for each later
    worker. GPipe (Huang et al. 2019, arXiv:1811.06965): all forward passes first.

    With several chunks, a group of micro-batches, one for each worker, passes through a chunk before the next chunk
    begins; what is left over belongs to the first group. Both kinds of 1F1B then start with two more forward passes for
    each later worker, and with those of the first group in all chunks but one.

    Args:
      place: Place of the worker in the pipeline, from 0.
      workers: Number of workers of the pipeline.
      micro_batches: Number of micro-batches of a step.
      schedule: `1f1b`, `eager_1f1b` or `gpipe`.
      chunks: Number of chunks, runs of consecutive layers, on a worker. Chunk c of a worker follows chunk c of the
        worker before it; chunk c of the first worker follows chunk c - 1 of the last.
    """
    first = min(micro_batches, workers + micro_batches % workers)  # a smaller group would leave workers waiting
    groups = [range(first), *(range(start, start + workers) for start in range(first, micro_batches, workers))]
    forward = [(FORWARD, number, chunk) for group in groups for chunk in range(chunks) for number in group]
    backward = [(BACKWARD, number, chunk) for group in groups for chunk in reversed(range(chunks)) for number in group]
    started = EAGER if chunks > 1 and schedule != GPIPE else schedule
    limit = micro_batches_in_flight(place, workers, workers, started)
    ahead = len(forward) if limit is None else limit + (chunks - 1) * first
    order, rest = forward[:ahead], forward[ahead:]
    for number, turn in enumerate(backward):
        order.append(turn)
        order += rest[number : number + 1]
    return order

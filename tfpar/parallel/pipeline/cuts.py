"""Cuts the graph of a model into the stages of a pipeline, and counts the micro-batches that a stage works on."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

from tfpar.config import ConfigError

# A stage may cost this many times the most expensive stage of the best cut, if fewer elements then cross.
_SLACK = 1.1
_SIZE_SLACK = 1.02  # the same factor on the size of its weights, if these are balanced first

GPIPE = "gpipe"
EAGER = "eager_1f1b"
BY_WEIGHTS = "weights"  # the value of --stage_balance that balances the size of the weights


def cut_evenly(
    costs: Sequence[int],
    crossing: Callable[[int], int],
    stages: int,
    weights: Sequence[Mapping[int, int]] | None = None,
) -> list[int] | None:
    """Returns a cut whose most expensive stage is cheap and that few elements cross.

    Args:
      costs: Costs of the steps, in order.
      crossing: `(step) -> elements` that cross a cut before the step; negative where no cut is allowed.
      stages: Number of stages.
      weights: For each step, the sizes of its weights, by index of the weight. If given, the cut first minimises the
        size of the largest stage, then the cost of the most expensive one. Weights that two stages share count in both.

    Returns:
      The number of the first step of each stage except the first; None if there are fewer places for cuts.
    """
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    places = [place for place in range(1, len(costs)) if crossing(place) >= 0 and 0 < total[place] < total[-1]]
    if len(places) < stages - 1:
        return None
    ends = [*places, len(costs)]
    limits: list[tuple[Callable[[int, int], float], float]] = []

    def fits(start: int, end: int) -> bool:
        return all(measure(start, end) <= limit for measure, limit in limits)

    def cost_of(start: int, end: int) -> float:
        return total[end] - total[start]

    measures = [(cost_of, _SLACK)] if weights is None else [(_size_of(weights), _SIZE_SLACK), (cost_of, _SLACK)]
    for measure, slack in measures:

        def largest(start: int, end: int, before: float, measure: Callable[[int, int], float] = measure) -> float:
            return max(before, measure(start, end)) if fits(start, end) else math.inf

        bound = _best(ends, stages, largest)
        assert bound is not None
        limits.append((measure, slack * bound[0]))

    def moved(start: int, end: int, before: float) -> float:
        uneven = (cost_of(start, end) / total[-1]) ** 2  # less than one element: breaks ties by evenness
        return before + uneven + (crossing(end) if end < len(costs) else 0) if fits(start, end) else math.inf

    best = _best(ends, stages, moved)
    assert best is not None
    return best[1]


def _size_of(weights: Sequence[Mapping[int, int]]) -> Callable[[int, int], float]:
    """Returns a function `(start, end) -> size` of the weights of these steps, each weight counted once."""

    @functools.cache
    def size(start: int, end: int) -> float:
        return sum({key: size for step in weights[start:end] for key, size in step.items()}.values())

    return size


def _best(
    ends: Sequence[int], stages: int, combine: Callable[[int, int, float], float]
) -> tuple[float, list[int]] | None:
    """Returns the cut with the least value, by dynamic programming over the ends of stages.

    Args:
      ends: The steps at which stages may end; the last stage ends at the last of them.
      stages: Number of stages.
      combine: `(start, end, value of the earlier stages) -> value` of a stage and the earlier ones together.
    """
    reached: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        is_last = stage == stages - 1
        following: dict[int, tuple[float, list[int]]] = {}
        for end in ends[-1:] if is_last else ends[:-1]:
            tried = [
                (combine(start, end, value), [*cuts, end]) for start, (value, cuts) in reached.items() if start < end
            ]
            if tried:
                following[end] = min(tried)
        reached = following
    value, cuts = reached.get(ends[-1], (math.inf, []))
    return (value, cuts[:-1]) if cuts else None


def parse_beginnings(patterns: str, stages: int) -> list[re.Pattern[str]]:
    """Returns the expressions of `--stages`.

    Args:
      patterns: Regular expressions, separated by commas.
      stages: Number of stages.

    Raises:
      ConfigError: The number of patterns is not `stages - 1`, or a pattern is not a regular expression.
    """
    texts = patterns.split(",")
    if len(texts) != stages - 1:
        raise ConfigError(
            f"--stages={patterns}: {len(texts)} expressions for a pipeline of {stages} stages. Give "
            f"{stages - 1}: one for the first layer of each stage but the first."
        )
    expressions = []
    for text in texts:
        try:
            expressions.append(re.compile(text.strip()))
        except re.error as error:
            raise ConfigError(f"--stages={patterns}: {text!r} is not a regular expression: {error}.") from None
    return expressions


def cut_at(patterns: str, beginnings: Sequence[tuple[int, Sequence[str]]], stages: int) -> list[int]:
    """Returns the cuts at patterns: each is before the first layer after the previous cut whose path matches.

    Args:
      patterns: Regular expressions, separated by commas.
      beginnings: For each layer, in the order in which they run, the number of its first step, and its paths.
      stages: Number of stages.

    Returns:
      The number of the first step of each stage except the first.

    Raises:
      ConfigError: The number of patterns is wrong, or a pattern is not a regular expression or matches no path.
    """
    cut: list[int] = []  # places among the beginnings
    for expression in parse_beginnings(patterns, stages):
        later = range(cut[-1] + 1 if cut else 1, len(beginnings))
        place = next((each for each in later if any(map(expression.search, beginnings[each][1]))), None)
        if place is None:
            behind = f" behind {beginnings[cut[-1]][1][0]!r}" if cut else " behind the first"
            every = dict.fromkeys(name for _, names in beginnings for name in names)
            raise ConfigError(
                f"--stages={patterns}: {expression.pattern!r} matches the path of no layer{behind}. The layers, in the "
                f"order in which they run: {', '.join(every)}."
            )
        cut.append(place)
    return [beginnings[place][0] for place in cut]


def micro_batches_in_flight(stage: int, stages: int, places: int, schedule: str) -> int | None:
    """Returns how many micro-batches a stage starts before the first one's backward pass must be done; None: no limit.

    With 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), that is the number that keeps the stage busy: a
    micro-batch returns to a stage after it has passed through the later stages twice, forward and backward. With eager
    1F1B (Zhuang et al. 2022, arXiv:2211.05322), it is one more for each later stage: tensors may then take as long to
    reach the next stage as a stage takes to compute.

    Args:
      stage: Number of the stage, from 0.
      stages: Number of stages.
      places: Number of devices, to which stages are assigned in turn.
      schedule: `1f1b`, `eager_1f1b` or `gpipe`.
    """
    if schedule == GPIPE:
        return None
    per_device = stages // places
    limit = math.ceil((stages - stage) / per_device) + (per_device > 1)
    return limit + math.ceil((stages - stage - 1) / per_device) if schedule == EAGER else limit

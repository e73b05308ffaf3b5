"""Cuts the graph of a model into the stages of a pipeline, and counts the micro-batches that a stage works on."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfpar.config import ConfigError

import numpy as np

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
    total = [0, *itertools.accumulate(costs)]
    places = [place for place in range(1, len(costs)) if crossing(place) >= 0 and 0 < total[place] < total[-1]]
    if len(places) < stages - 1:
        return None
    bounds = [0, *places, len(costs)]
    limits: list[tuple[_Measure, float]] = []
    cost_of = functools.partial(_costs, [total[bound] for bound in bounds])
    measures: list[tuple[_Measure, float]] = [(cost_of, _SLACK)]
    if weights is not None:
        measures.insert(0, (functools.partial(_sizes, bounds, weights), _SIZE_SLACK))
    for measure, slack in measures:
        limits.append((measure, slack * _least_largest(measure, limits, stages, len(bounds))))
    crossed = [0, *map(crossing, places), 0]
    return [bounds[place] for place in _least_moved(cost_of, limits, stages, crossed, total[-1])]


# Returns, for each bound but the first, what the stages that end there measure, by the bound at which they begin.
_Measure = Callable[[], Iterator[np.ndarray]]


def _costs(total: Sequence[int]) -> Iterator[np.ndarray]:
    """A `_Measure`: the costs of stages, from the costs of all steps before each bound."""
    before = np.array(total, np.float64)
    for end in range(1, len(before)):
        yield before[end] - before[:end]


def _sizes(bounds: Sequence[int], weights: Sequence[Mapping[int, int]]) -> Iterator[np.ndarray]:
    """A `_Measure`: the sizes of the weights of stages, each weight counted once."""
    sizes = np.zeros(len(bounds))
    last: dict[int, int] = {}  # for each weight, the last step so far that has it
    for end in range(1, len(bounds)):
        for step in range(bounds[end - 1], bounds[end]):
            for key, size in weights[step].items():
                # Stages that begin before the last step with the weight have it already.
                sizes[bisect.bisect_right(bounds, last.get(key, -1)) : end] += size
                last[key] = step
        yield sizes[:end].copy()


def _fitting(limits: Sequence[tuple[_Measure, float]], bounds: int) -> Iterator[np.ndarray]:
    """For each bound but the first, whether a stage that ends there is within all limits, by the bound at which it
    begins."""
    measured = [measure() for measure, _ in limits]
    for end in range(1, bounds):
        fits = np.ones(end, bool)
        for values, (_, limit) in zip(measured, limits, strict=True):
            fits &= next(values) <= limit
        yield fits


def _least_largest(measure: _Measure, limits: Sequence[tuple[_Measure, float]], stages: int, bounds: int) -> float:
    """Returns the measure of the largest stage of the cut for which it is least, by dynamic programming.

    Args:
      measure: The measure of a stage.
      limits: Other measures, and what they may be at most.
      stages: Number of stages.
      bounds: Number of places at which stages may begin or end, with the beginning and the end.
    """
    largest = np.full((stages + 1, bounds), np.inf)  # of so many stages, the last of which ends at a bound
    largest[0, 0] = 0.0
    for end, (own, fits) in enumerate(zip(measure(), _fitting(limits, bounds), strict=True), 1):
        tried = np.where(fits, np.maximum(largest[:-1, :end], own), np.inf)
        largest[1:, end] = tried.min(axis=1)
    return float(largest[-1, -1])


def _least_moved(
    cost_of: _Measure,
    limits: Sequence[tuple[_Measure, float]],
    stages: int,
    crossed: Sequence[float],
    total: float,
) -> list[int]:
    """Returns the cut that the fewest elements cross, by dynamic programming: of equal cuts the most even one, and of
    these the one whose stages end first.

    Args:
      cost_of: The costs of stages.
      limits: Measures of a stage, and what they may be at most.
      stages: Number of stages.
      crossed: For each bound, the elements that cross it.
      total: The cost of all steps.

    Returns:
      The numbers of the bounds between stages.
    """
    moved = np.full((stages + 1, len(crossed)), np.inf)
    moved[0, 0] = 0.0
    begins = np.zeros(moved.shape, np.int64)

    def cut(count: int, end: int) -> list[int]:
        """The bounds of the first stages, the last of which ends at a bound."""
        return [*cut(count - 1, int(begins[count, end])), end] if count else []

    for end, (costs, fits) in enumerate(zip(cost_of(), _fitting(limits, len(crossed)), strict=True), 1):
        # Less than one element: breaks ties by evenness. NumPy's squares differ from Python's in the last bit, which
        # would choose others of equal cuts than in runs that are resumed.
        shares = zip((costs / total).tolist(), fits, strict=True)
        uneven = np.array([share**2 if fit else math.inf for share, fit in shares])
        tried = moved[:-1, :end] + uneven + crossed[end]
        moved[1:, end] = tried.min(axis=1)
        for count in np.flatnonzero(np.isfinite(moved[1:, end])).tolist():
            equal = np.flatnonzero(tried[count] == moved[count + 1, end]).tolist()
            begins[count + 1, end] = equal[0] if len(equal) == 1 else min(equal, key=functools.partial(cut, count))
    return cut(stages, len(crossed) - 1)[:-1]


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

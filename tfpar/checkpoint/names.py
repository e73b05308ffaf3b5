"""The names of variables in a checkpoint: their paths, which may repeat in a model of several functional models."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tfpar.config import ConfigError

V = TypeVar("V")
_POSITION = re.compile(r"#(\d+)$")  # of a name whose path repeats
_COUNT = re.compile(r"_\d+")
_COUNT_WITHIN = re.compile(r"_\d+(?!\d*$)")


def names_of(variables: Sequence[Any]) -> list[str]:
    """The paths of variables; a repeated path gets its position appended."""
    names: dict[str, None] = {}
    for position, variable in enumerate(variables):
        names[variable.path if variable.path not in names else f"{variable.path}#{position}"] = None
    return list(names)


def occurrences(names: Iterable[str]) -> dict[tuple[str, int], str]:
    """Names from `named` by path and occurrence, from 0 on: positions depend on what else was named."""
    found: dict[tuple[str, int], str] = {}
    counts: collections.Counter[str] = collections.Counter()
    for name in sorted(names, key=_position):
        path = _path_of(name)
        found[path, counts[path]] = name
        counts[path] += 1
    return found


def _position(name: str) -> int:
    found = _POSITION.search(name)
    return int(found[1]) if found else -1


def _path_of(name: str) -> str:
    """The path in a name from `names_of`."""
    return _POSITION.sub("", name)


def without_counts(name: str) -> str:
    """The path in a name without Keras' counts, as in `dense_1`: it counts over all models of a process."""
    return _COUNT.sub("", _path_of(name))


def state_without_counts(name: str) -> str:
    """The same of the state of a weight: a number at the end belongs to the name of the state, as in `momentum_2`."""
    return _COUNT_WITHIN.sub("", _path_of(name))


def common_names(names: Sequence[Sequence[str]]) -> list[str]:
    """The names under which workers save parts of the same variables: those of worker 0.

    Args:
      names: By worker, the names of its variables in order. They may differ in Keras' counts.

    Raises:
      ConfigError: They differ otherwise; names the first that does.
    """
    first = list(names[0])
    for worker, own in enumerate(names):
        pairs = itertools.zip_longest(first, own, fillvalue="no other")
        if other := next((pair for pair in pairs if without_counts(pair[0]) != without_counts(pair[1])), None):
            raise ConfigError(
                f"--workdir: the workers save parts of one model, whose variables have other names on worker {worker} "
                f"than on worker 0: {other[1]!r} is {other[0]!r} there. Build the same model on every worker, and give "
                "its layers the same names."
            )
    return first


def saved_names(variables: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """The saved name of each variable that was saved, by its own name."""
    known = occurrences(saved)
    return {name: known[key] for key, name in occurrences(variables).items() if key in known}


def by_occurrence(values: Mapping[str, V]) -> dict[str, V]:
    """Values by path; a repeated path gets the number of its occurrences before appended, and no position."""
    keys = {name: key for key, name in occurrences(values).items()}
    return {f"{keys[name][0]}#{keys[name][1]}".removesuffix("#0"): value for name, value in values.items()}

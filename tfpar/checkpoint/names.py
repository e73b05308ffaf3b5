"""The names of variables in a checkpoint: their paths, which may repeat in a model of several functional models."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tfpar.config import ConfigError

V = TypeVar("V")
_POSITION = re.compile(r"#(\d+)$")  # of a name whose path repeats
_COUNT = re.compile(r"_\d+")
_COUNT_WITHIN = re.compile(r"_\d+(?!\d*$)")
_NUMBER = re.compile(r"(?<=[_#])\d+")
_Tree = dict[str, Any]  # by part of a path: the parts below it; under "": the name that ends there


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


def averages_among(names: Iterable[str]) -> dict[str, str]:
    """The moving averages of weights among the names in a checkpoint, `model/PATH` and `optimizer/OPTIMIZER/STATE`.

    Keras (3.15) names an average by the path of its weight, with underscores. If several weights have the same name so,
    they and their averages are in the same order; without an average for each, it is not known whose they are.

    Returns:
      For each weight that has an average: the name of the average.
    """
    weights: dict[str, list[str]] = collections.defaultdict(list)
    averages: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        kind, _, path = _path_of(name).partition("/")
        if kind == "model":
            weights[path.replace("/", "_")].append(name)
        elif path.endswith("_average"):
            averages[path.rpartition("/")[2].removesuffix("_average")].append(name)
    pairs = ((weights[path], averages[path]) for path in weights if len(weights[path]) == len(averages[path]))
    return {weight: average for each in pairs for weight, average in zip(*each, strict=True)}


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


def matched(own: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """The saved names whose weights a model takes, by its own names.

    Names that differ only in Keras' counts are matched by position. Otherwise, part by part of the paths, equal names
    belong together, but in order where all counts are shifted: `dense_3` and `dense_4` to `dense` and `dense_1`. If
    nothing is alike, the name of the model is left out: the first part, if all paths share it. If still nothing is, as
    many are matched by position.

    Args:
      own: From `by_occurrence`, in the order of the weights.
      saved: The same of the saved weights.
    """
    own, saved = list(own), list(saved)
    if set(own) == set(saved):
        return {name: name for name in own}
    if [*map(without_counts, own)] == [*map(without_counts, saved)]:  # Keras counts names over a whole process
        return dict(zip(own, saved, strict=True))
    ours, theirs = _tree(own), _tree(saved)
    only = {part for name in own for part in name.split("/")} ^ {part for name in saved for part in name.split("/")}
    # A `Sequential` read from a .keras file has paths without its name (Keras 3.15).
    for one, other in itertools.product((ours, _below_model(ours)), (theirs, _below_model(theirs))):
        if found := dict(_paired(one, other, only)):
            return found
    return dict(zip(own, saved, strict=True)) if len(own) == len(saved) else {}


def renamed(taken: Mapping[str, str]) -> list[str]:
    """What has another name in `matched`, without the parts that are the same: `['dense_3 from dense']`."""
    found: dict[str, None] = {}
    for own, saved in taken.items():
        ours, theirs = own.split("/"), saved.split("/")
        while ours and theirs and ours[-1] == theirs[-1]:
            ours.pop()
            theirs.pop()
        if ours and theirs:
            found[f"{'/'.join(ours)} from {'/'.join(theirs)}"] = None
    return list(found)


def _tree(names: Iterable[str]) -> _Tree:
    tree: _Tree = {}
    for name in names:
        node = tree
        for part in name.split("/"):
            node = node.setdefault(part, {})
        node[""] = name
    return tree


def _below_model(tree: _Tree) -> _Tree:
    return next(iter(tree.values())) if len(tree) == 1 else tree


def _paired(own: _Tree, saved: _Tree, only: set[str]) -> Iterator[tuple[str, str]]:
    """Pairs of names; `only` are the parts that only one of the models has anywhere."""
    if "" in own and "" in saved:
        yield own[""], saved[""]
    ours, theirs = _by_stem(own), _by_stem(saved)
    for stem in ours:
        for one, other in _alike(ours[stem], theirs.get(stem, []), stem in only):
            yield from _paired(own[one], saved[other], only)


def _by_stem(tree: _Tree) -> dict[str, list[str]]:
    """The parts of paths by what they are without counts, sorted by their counts."""
    stems: dict[str, list[str]] = {}
    for part in sorted(filter(None, tree), key=_numbers):
        stems.setdefault(without_counts(part), []).append(part)
    return stems


def _alike(own: list[str], saved: list[str], shifted: bool) -> Iterable[tuple[str, str]]:
    """Pairs of parts with one stem: equal ones, or in order if Keras seems to have counted them from another number.

    Keras gives the first layer of its kind in a process no number: `shifted` says that only one model has this name.
    Names that a user numbers are mostly some of the others.
    """
    pairs = [*zip(own, saved, strict=False)]
    offsets = {tuple(a - b for a, b in itertools.zip_longest(*map(_numbers, pair), fillvalue=0)) for pair in pairs}
    shifted = shifted or (len(offsets) == 1 and not set(own) <= set(saved))
    equal = [(part, part) for part in own if part in saved]
    return equal if equal and not shifted else pairs


def _numbers(part: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(part)))

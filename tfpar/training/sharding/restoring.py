"""Restores the state of a run whose weights had owners, or get owners, whatever devices the saved run had."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from tfpar.checkpoint import run_state
from tfpar.checkpoint.arrays import SavedArrays
from tfpar.checkpoint.names import occurrences, state_without_counts, without_counts
from tfpar.optim.keras_whole import paths_of_rows_and_columns
from tfpar.parallel.split import assign_whole, shape_of
from tfpar.training.sharding.optimizer import OwnShare
from tfpar.training.sharding.saved import take_exact_weights, whole_arrays

import keras
import numpy as np

_Key = TypeVar("_Key")


def restore_shares(
    variables: Mapping[str, keras.Variable],
    saved: SavedArrays,
    order: Sequence[str],
    exports: Sequence[Mapping[str, np.ndarray]],
    *,
    weights: Sequence[keras.Variable],
    optimizer: keras.optimizers.Optimizer,
    share: OwnShare | None,
) -> None:
    """Restores the common variables and this worker's share.

    Args:
      variables: The common variables by name, in order.
      saved: Those of the saved run.
      order: Their names, in the order in which they were saved.
      exports: The shares of all workers of the saved run; empty if it had none.
      weights: The model's trainable weights.
      optimizer: The optimizer.
      share: This worker's share; None if every worker has all state.

    Raises:
      ConfigError: What was saved does not fit.
    """
    pieces = whole_arrays(exports, [shape_of(weight) for weight in weights])
    exact = take_exact_weights(pieces)
    owned = {index for _, index in pieces}
    common = range(len(weights)) if share is None else share.whole
    here = _StateNames(list(variables), optimizer, weights, common)
    there = _StateNames(order, optimizer, weights, [index for index in range(len(weights)) if index not in owned])
    whole = {name: value for key, value in pieces.items() if (name := here.find(*key)) is not None}
    whole = {name: _reshaped(value, shape_of(variables[name])) for name, value in whole.items()}
    in_one = {name: variable for name, variable in variables.items() if name not in whole}
    if share is not None:
        # Only those of weights that every worker updates; a path may repeat among those of the others.
        alike, without = {*map(without_counts, in_one)}, there.rows_and_columns(set(common))
        order = [name for name in order if without_counts(name) in alike and name not in without]
        saved_in_one = saved.only(order)
        names = {*run_state.names_in(saved_in_one, in_one, order).values()}
        order = [name for name in order if name in names or name.startswith("model/")]
    run_state.restore({name: variables[name] for name in whole}, whole)
    run_state.restore(in_one, saved if share is None else saved.only(order), order)
    # Residuals that owners had not sent take effect now or, if the weights have an owner again, with the next step.
    for index in common:
        if index in exact:
            assign_whole(weights[index], exact[index])
    if share is not None:
        known = {(state_without_counts(name), index): value for (name, index), value in pieces.items()}

        def read(name: str, index: int) -> np.ndarray | None:
            if (state_without_counts(name), index) in known:
                return known[state_without_counts(name), index]
            found = there.find(name, index)
            return None if found is None else saved[found]

        share.restore(read, exact=exact)


class _StateNames:
    """The names of variables of an optimizer that has all state of some weights.

    Keras counts names over all models of a process, so that the second model of a program, or its optimizer, has other
    numbers in them. Names may also repeat.

    Args:
      names: All names, in order; also others.
      optimizer: An optimizer of the same kind.
      weights: The model's trainable weights.
      included: Indices of those weights.
    """

    def __init__(
        self,
        names: Sequence[str],
        optimizer: keras.optimizers.Optimizer,
        weights: Sequence[keras.Variable],
        included: Collection[int],
    ) -> None:
        self._known = occurrences(names)
        self._alike: dict[str, list[str]] = {}
        for name in names:
            self._alike.setdefault(state_without_counts(name), []).append(name)
        self._twins = _before({index: weights[index].path for index in sorted(included)})
        self._similar = _before({index: without_counts(weights[index].path) for index in sorted(included)})
        self._same = collections.Counter(without_counts(weights[index].path) for index in included)
        self._paths = [without_counts(weight.path) for weight in weights]
        paths = {
            (f"optimizer/{state_without_counts(name)}", index): f"optimizer/{state_without_counts(path)}"
            for (name, index), path in paths_of_rows_and_columns(optimizer, weights).items()
        }
        counts = _before({key: path for key, path in paths.items() if key[1] in self._twins})
        self._rows_and_columns = {key: (path, counts.get(key)) for key, path in paths.items()}

    def find(self, name: str, index: int) -> str | None:
        """The name of the state of a weight, from its name in shards and the index of the weight; None if there is
        none."""
        if index not in self._twins:
            return None
        key = state_without_counts(name), index
        if key in self._rows_and_columns:
            path, number = self._rows_and_columns[key]
            names = self._alike.get(path, [])
            return names[number] if number is not None and number < len(names) else None
        if (name, self._twins[index]) in self._known:
            return self._known[name, self._twins[index]]
        names = self._alike.get(key[0], [])
        # Not if only some of the weights have such state: Muon treats some as AdamW does.
        return names[self._similar[index]] if len(names) == self._same[self._paths[index]] else None

    def rows_and_columns(self, without: Collection[int]) -> set[str]:
        """Names of rows and columns of other weights than these."""
        keys = (key for key in self._rows_and_columns if key[1] not in without)
        return {name for key in keys if (name := self.find(*key)) is not None}


def _before(values: Mapping[_Key, str]) -> dict[_Key, int]:
    """For each value, how many before it are equal."""
    counts: collections.Counter[str] = collections.Counter()
    found = {}
    for key, value in values.items():
        found[key] = counts[value]
        counts[value] += 1
    return found


def _reshaped(value: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Adafactor's rows of a weight with one column have as many elements as the weight."""
    return value.reshape(shape) if value.size == np.prod(shape, dtype=int) else value

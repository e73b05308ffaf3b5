"""What one replica owns of the weights, with the optimizer that updates it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpar.exchange.sharding.shards import Piece
from tfpar.optim import keras_internals
from tfpar.optim.optimizers import build_for_some
from tfpar.parallel.split import keep_rows_and_columns_whole, keeps_slots_beside, model_split_of

import keras
import tensorflow as tf


class ReplicaShare:
    """What one replica owns, with the optimizer that updates it, on its device.

    Args:
      optimizer: Not yet built.
      device: The device of the replica.
      owned: Its pieces of each vector.
      make: Creates the variable of a piece.
      whole: Variables that every worker updates, if this replica updates them for its worker.
      every: The model's trainable weights.

    Attributes:
      optimizer: Built for the pieces of all vectors, one after the other, and then for `whole`.
      device: The device of the replica.
      owned: Its pieces.
      variables: The variables that hold them.
      positions: For each of these variables its vector, and its index among the worker's pieces of that vector.
      idle: A variable of one element, if the optimizer would have none: Keras 3.15 then counts no iterations, and these
        must be the same everywhere.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        device: str,
        owned: Sequence[tuple[tuple[int, int], Piece]],
        make: Callable[[Piece], keras.Variable],
        whole: Sequence[keras.Variable],
        every: Sequence[keras.Variable],
    ) -> None:
        self.device = device
        self.owned = [piece for _, piece in owned]
        self.positions = [position for position, _ in owned]
        with tf.device(device):
            self.variables = [make(piece) for piece in self.owned]
            nothing = not self.variables and not whole
            self.idle = [keras.Variable(tf.zeros([1]), name="nothing")] if nothing else []
            # Only those of optimizers that need whole tensors say so.
            self._made_for = _noted_slots(optimizer)
            parts = any(map(model_split_of, self.variables))
            if parts:
                keeps_slots_beside(optimizer)
            build_for_some(optimizer, [*self.variables, *whole, *self.idle], every)
            if parts:
                keep_rows_and_columns_whole(optimizer)
        self.optimizer = optimizer
        self._weights = len(self.variables) + len(whole)
        self._initial = {id(variable): _first_element(variable) for _, _, variable in self.slots()}

    def common_variables(self) -> list[keras.Variable]:
        """Variables of the optimizer that belong to no piece, in order."""
        starts = tuple(map(_reference, self.idle))
        of_idle = {key for key, (place, _) in self._in_lists.items() if place >= self._weights}
        return [
            variable
            for variable in self.optimizer.variables
            if self._slot(variable) is None and id(variable) not in of_idle and not name_of(variable).startswith(starts)
        ]

    def slots(self) -> Iterator[tuple[str, Piece, keras.Variable]]:
        """For each slot of a piece: its name for the whole weight without the optimizer's prefix, the piece and the
        variable."""
        for variable in self.optimizer.variables:
            if slot := self._slot(variable):
                place, name = slot
                yield name, self.owned[place], variable

    def initial(self, slot: keras.Variable) -> float:
        """The value that all elements of a slot had at first, as those of padding always have."""
        return self._initial[id(slot)]

    def _slot(self, variable: keras.Variable) -> tuple[int, str] | None:
        """The index of the piece that a variable of the optimizer belongs to, and its name for the whole weight; None
        if it is of none."""
        name = name_of(variable)
        place, attribute = self._in_lists.get(id(variable), (-1, ""))
        if place < 0 and id(variable) in self._made_for:
            place = self._places.get(id(self._made_for[id(variable)]), -1)
        if not 0 <= place < len(self.variables):
            return None
        # Keras 3.15 names most variables of an optimizer by the path of the weight that they belong to. Adafactor's
        # rows and columns have only its name, both the same.
        start = _reference(self.variables[place])
        return place, name if name.startswith(start) else start + attribute.strip("_")

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        """The indices of the pieces, by the `id` of their variables."""
        return {id(variable): place for place, variable in enumerate(self.variables)}

    @functools.cached_property
    def _in_lists(self) -> dict[int, tuple[int, str]]:
        """For variables in attributes of the optimizer that have one for each weight, by `id`: the index of the weight,
        and the name of the attribute."""
        count = self._weights + len(self.idle)
        every = [*map(id, self.optimizer.variables)]
        lists = {
            name: value
            for name, value in vars(self.optimizer).items()
            if isinstance(value, list) and len(value) == count and [*map(id, value)] != every
        }
        return {id(variable): (place, name) for name, value in lists.items() for place, variable in enumerate(value)}


def _noted_slots(optimizer: keras.optimizers.Optimizer) -> dict[int, keras.Variable]:
    """Makes an unbuilt optimizer note the weights that it makes state for, by the `id` of the state. Their paths do not
    tell: all pieces of a weight have the same."""
    make, found = optimizer.add_variable_from_reference, dict[int, keras.Variable]()

    def noting(reference_variable: keras.Variable, *args: Any, **kwargs: Any) -> keras.Variable:
        slot = make(reference_variable, *args, **kwargs)
        found[id(slot)] = reference_variable
        return slot

    keras_internals.set_untracked(optimizer, add_variable_from_reference=noting)
    return found


def name_of(variable: keras.Variable) -> str:
    """The name of an optimizer's variable without the optimizer's prefix."""
    return variable.path.partition("/")[2]


def _first_element(variable: keras.Variable) -> float:
    return float(tf.reshape(variable.value, [-1])[0])


def _reference(piece: keras.Variable) -> str:
    return piece.path.replace("/", "_") + "_"

"""Updates of optimizers that need whole tensors, whose parts the devices of a model axis, or the replicas, have.

Muon orthogonalises a whole matrix, LAMB and LARS scale by the norm of one, Adafactor keeps the means of its rows and
columns. The weights of a model are dealt out to the devices that have their parts, so that each updates about as many
as the others: a device receives all parts of the weights that it was dealt, with those of their gradients and slots,
updates them, and returns the parts of the new values, and the new rows and columns, which every device has. Weights
with parts of the same shape travel together, one for each device, in two all-to-all exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tfpar.optim import keras_internals
from tfpar.optim.keras_whole import needs_whole_tensor, rows_and_columns
from tfpar.optim.pure_update import PureUpdate, WholeTensors
from tfpar.parallel.division import Split
from tfpar.parallel.model_axis import Place
from tfpar.parallel.pipeline.devices import place_of
from tfpar.parallel.split import model_split_of, slots_of

import keras
import tensorflow as tf


class DealtTensors(WholeTensors):
    """The weights that a built optimizer updates as a whole, dealt out to the devices that have their parts.

    Args:
      optimizer: The optimizer. Its slots are divided like the weights.
      size: Number of devices.
      on: Returns the context of the program that updates a weight on this device, see `ModelAxis.on`.
      split_of: Returns the division of a weight over these devices; None if there is none.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        size: int,
        on: Callable[[keras.Variable], AbstractContextManager[Place]],
        split_of: Callable[[keras.Variable], Split | None] = model_split_of,
    ) -> None:
        self._on, self._split_of = on, split_of
        self._slots: dict[int, list[keras.Variable]] = {}
        self._whole_slots: dict[int, list[keras.Variable]] = {}
        alike: dict[Any, list[keras.Variable]] = {}
        for index, variable in enumerate(keras_internals.trainable_variables(optimizer)):
            split = split_of(variable)
            if split and needs_whole_tensor(optimizer, variable):
                self._slots[id(variable)] = slots = slots_of(optimizer, variable)
                self._whole_slots[id(variable)] = rows_and_columns(optimizer, index)
                kind = place_of(variable) or 0, tuple(variable.shape), variable.dtype, split, len(slots)
                alike.setdefault(kind, []).append(variable)
        self._chunks: list[list[keras.Variable | None]] = []
        dealt = 0
        for every in alike.values():
            for start in range(0, len(every), size):
                row: list[keras.Variable | None] = [None] * size
                for variable in every[start : start + size]:
                    row[dealt % size] = variable  # the next device, also of the next kind
                    dealt += 1
                self._chunks.append(row)

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __contains__(self, variable: keras.Variable) -> bool:
        """See `WholeTensors`."""
        return id(variable) in self._slots

    def update(self, view: PureUpdate, gradients: dict[int, tf.Tensor], rate: Any) -> None:
        """See `WholeTensors`. One chunk after the other, so that few whole tensors exist at a time."""
        before: list[tf.Tensor] = []
        for every in self._chunks:
            chunk = [each if id(each) in gradients else None for each in every]  # some may have no gradient
            first = next((each for each in chunk if each is not None), None)
            if first is None:
                continue
            with self._on(first) as place, tf.device(place.device), tf.control_dependencies(before):
                before = [self._update_chunk(view, place, chunk, gradients, rate)]

    def _update_chunk(
        self,
        view: PureUpdate,
        place: Place,
        chunk: Sequence[keras.Variable | None],
        gradients: dict[int, tf.Tensor],
        rate: Any,
    ) -> tf.Tensor:
        """Updates at most one weight on each device, in the order of `chunk`; returns what was received last."""
        states = [[] if each is None else [each, *self._slots[id(each)]] for each in chunk]
        some = next(state for state in states if state)
        split, shape, elements = self._split_of(some[0]), some[0].shape, math.prod(some[0].shape)
        wholes = [[] if each is None else self._whole_slots[id(each)] for each in chunk]
        sizes = [math.prod(each.shape) for each in max(wholes, key=len)]
        assert isinstance(split, Split)

        def row_of(state: Sequence[keras.Variable]) -> tf.Tensor:
            if not state:
                return tf.zeros([(1 + len(some)) * elements], some[0].dtype)
            return _row([gradients[id(state[0])], *(each.value for each in state)])

        received = place.swap(tf.stack([*map(row_of, states)]))
        if own := states[place.rank]:
            parts = tf.unstack(tf.reshape(received, [place.size, 1 + len(own), *shape]), axis=1)
            gradient, *values = (split.joined_tensor(tf.unstack(each)) for each in parts)
            for each, value in zip(own, values, strict=True):
                view.put(each, value)
            view.update_step(gradient, own[0], rate)
            same = [each.value for each in wholes[place.rank]]
            new = zip(*(split.part_tensors(each.value) for each in own), strict=True)
            rows = tf.stack([_row([*parts, *same]) for parts in new])
        else:
            rows = tf.zeros([place.size, len(some) * elements + sum(sizes)], some[0].dtype)
        returned = place.swap(rows)
        for row, state, whole in zip(tf.unstack(returned), states, wholes, strict=True):
            if state:
                new = tf.split(row, [*[elements] * len(state), *sizes])
                for each, value in zip([*state, *whole], new, strict=True):
                    view.put(each, tf.reshape(value, each.shape))
        return returned


def _row(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensors as a vector."""
    return tf.concat([tf.reshape(each, [-1]) for each in tensors], axis=0)

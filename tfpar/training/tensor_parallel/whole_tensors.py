"""Updates of optimizers that need whole tensors, whose parts the devices of a model axis have.

Muon orthogonalises a whole matrix, LAMB and LARS scale by the norm of one. The weights of a model are dealt out to the
devices of the axis, so that each updates about as many as the others: a device receives all parts of the weights that
it was dealt, with those of their gradients and slots, updates them, and returns the parts of the new values. Weights
with parts of the same shape travel together, one for each device, in two all-to-all exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tfpar.optim import keras_internals
from tfpar.optim.keras_whole import needs_whole_tensor
from tfpar.optim.pure_update import PureUpdate, WholeTensors
from tfpar.parallel.division import Split
from tfpar.parallel.model_axis import ModelAxis, Place
from tfpar.parallel.pipeline.devices import place_of
from tfpar.parallel.split import model_split_of, slots_of

import keras
import tensorflow as tf


class DealtTensors(WholeTensors):
    """The weights that a built optimizer updates as a whole, dealt out to the devices of a model axis.

    Args:
      optimizer: The optimizer. Its slots are divided like the weights.
      axis: The devices.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, axis: ModelAxis) -> None:
        self._axis = axis
        self._slots: dict[int, list[keras.Variable]] = {}
        alike: dict[Any, list[keras.Variable]] = {}
        for variable in keras_internals.trainable_variables(optimizer):
            split = model_split_of(variable)
            if split and needs_whole_tensor(optimizer, variable):
                self._slots[id(variable)] = slots = slots_of(optimizer, variable)
                kind = place_of(variable) or 0, tuple(variable.shape), variable.dtype, split, len(slots)
                alike.setdefault(kind, []).append(variable)
        starts = ((every, start) for every in alike.values() for start in range(0, len(every), axis.size))
        self._chunks = [every[start : start + axis.size] for every, start in starts]

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __contains__(self, variable: keras.Variable) -> bool:
        """See `WholeTensors`."""
        return id(variable) in self._slots

    def update(self, view: PureUpdate, gradients: dict[int, tf.Tensor], rate: Any) -> None:
        """See `WholeTensors`. One chunk after the other, so that few whole tensors exist at a time."""
        before: list[tf.Tensor] = []
        for chunk in self._chunks:
            stage = place_of(chunk[0]) or 0
            with self._axis.on_own_device(stage) as place, tf.device(place.device), tf.control_dependencies(before):
                before = [self._update_chunk(view, place, chunk, [gradients[id(each)] for each in chunk], rate)]

    def _update_chunk(
        self,
        view: PureUpdate,
        place: Place,
        chunk: Sequence[keras.Variable],
        gradients: Sequence[tf.Tensor],
        rate: Any,
    ) -> tf.Tensor:
        """Updates at most one weight for each device; returns what the last exchange received."""
        split = model_split_of(chunk[0])
        assert isinstance(split, Split)
        states = [[variable, *self._slots[id(variable)]] for variable in chunk]
        pairs = zip(gradients, states, strict=True)
        rows = [_row([gradient, *(each.value for each in state)]) for gradient, state in pairs]
        received = _swapped(place, rows)
        if place.rank < len(chunk):
            variable, *_ = state = states[place.rank]
            shape = [place.size, 1 + len(state), *variable.shape]
            gradient, *values = (split.joined_tensor(tf.unstack(each)) for each in _by_tensor(received, shape))
            for each, value in zip(state, values, strict=True):
                view.put(each, value)
            view.update_step(gradient, variable, rate)
            parts = zip(*(split.part_tensors(each.value) for each in state), strict=True)
            rows = [*map(_row, parts)]
        else:
            rows = [tf.zeros([len(states[0]) * math.prod(chunk[0].shape)], received.dtype)] * place.size
        returned = _swapped(place, rows)
        for row, state in zip(tf.unstack(returned), states, strict=False):
            for each, value in zip(state, tf.unstack(tf.reshape(row, [len(state), *chunk[0].shape])), strict=True):
                view.put(each, value)
        return returned


def _row(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensors, all of the same shape, as a vector."""
    return tf.concat([tf.reshape(each, [-1]) for each in tensors], axis=0)


def _by_tensor(rows: tf.Tensor, shape: Sequence[int]) -> list[tf.Tensor]:
    """Rows of `_row` from all devices, as the parts `[devices, ...]` of each tensor."""
    parts: list[tf.Tensor] = tf.unstack(tf.reshape(rows, shape), axis=1)
    return parts


def _swapped(place: Place, rows: Sequence[tf.Tensor]) -> tf.Tensor:
    """The rows that the devices have for this one, from the rows that this one has for them, or for the first ones."""
    empty = [tf.zeros_like(rows[0])] * (place.size - len(rows))
    return place.swap(tf.stack([*rows, *empty]))

"""Weights of which every replica keeps a part, and that are whole only while a layer computes with them.

ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054). The parts of all replicas are gathered where a value is read
in a call of the model; the gradient of the whole goes back as the sum over the replicas, to each its part. Both happen
between all replicas, in one call each for all weights that are gathered together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.optim import keras_calls
from tfpar.parallel.model_axis import Place, current_place
from tfpar.parallel.split import FlatSplit, split_of

import keras
import tensorflow as tf


def is_part(variable: keras.Variable, value: Any) -> bool:
    """Whether this is a part of a sharded weight, and the program of a replica is being traced."""
    split = split_of(variable)
    return (
        isinstance(split, FlatSplit)
        and current_place() is not None
        and tuple(value.shape) == (split.elements,) != split.shape
    )


def gathered(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values of variables, whole; parts are gathered, all in one call.

    Args:
      variables: Any.
      values: For each its value, or a part `[S]` of it.
    """
    places = [place for place, (each, value) in enumerate(zip(variables, values, strict=True)) if is_part(each, value)]
    place, whole = current_place(), list(values)
    if places and place is not None:
        splits = [split_of(variables[each]) for each in places]
        found = _gather(place, [values[each] for each in places], [each for each in splits if each is not None])
        for each, value in zip(places, found, strict=True):
            whole[each] = value
    return whole


def shown_whole(variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[Any]:
    """In this context sharded weights say that they have their whole shape, as layers expect that ask for it."""
    splits = [(variable, split_of(variable)) for variable in variables]
    shapes = [(variable, split.shape) for variable, split in splits if isinstance(split, FlatSplit)]
    return keras_calls.shapes_of_variables(shapes) if shapes and current_place() else contextlib.nullcontext()


class Wholes:
    """The whole values that one call of a model has gathered so far, each once."""

    def __init__(self) -> None:
        self._known: dict[int, tf.Tensor] = {}

    def of(self, variable: keras.Variable, value: Any) -> Any:
        """The value, or the whole of which it is a part."""
        if value is None or not is_part(variable, value):
            return value
        if id(variable) not in self._known:
            self._known[id(variable)] = gathered([variable], [value])[0]
        return self._known[id(variable)]


def with_wholes(
    values: Mapping[int, tf.Tensor], variables: Sequence[keras.Variable], given: Sequence[tf.Tensor], after: Any
) -> dict[int, tf.Tensor]:
    """Values by the identity of their variables, those of `variables` replaced by what is `given`, whole.

    Args:
      values: Of any variables.
      variables: Of a block.
      given: For each its value, or a part.
      after: Tensors that must be there before anything is gathered: what goes into the block, so that no block's
        weights are gathered before its turn.
    """
    with tf.control_dependencies(after):
        return {**values, **dict(zip(map(id, variables), gathered(variables, given), strict=True))}


def _gather(place: Place, parts: Sequence[tf.Tensor], splits: Sequence[Any]) -> list[tf.Tensor]:
    """Whole tensors, of the parts of all replicas. Parts get the sums of the gradients of all replicas."""
    sizes = [split.elements for split in splits]

    @tf.custom_gradient
    def operator(*parts: tf.Tensor) -> Any:
        rows = place.all_gather(tf.concat(parts, axis=0))

        def scatter(*upstream: Any) -> list[tf.Tensor]:
            columns = []
            for gradient, split in zip(upstream, splits, strict=True):
                flat = tf.reshape(tf.convert_to_tensor(gradient), [-1])
                missing = place.size * split.elements - math.prod(split.shape)
                columns.append(tf.reshape(tf.pad(flat, [[0, missing]]), [place.size, split.elements]))
            received = place.all_to_all(tf.concat(columns, axis=1))
            return tf.split(tf.add_n(tf.unstack(received)), sizes)

        return [
            tf.reshape(tf.reshape(column, [-1])[: math.prod(split.shape)], split.shape)
            for column, split in zip(tf.split(rows, sizes, axis=1), splits, strict=True)
        ], scatter

    return list(operator(*parts))

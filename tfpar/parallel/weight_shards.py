"""Sharded weights: every replica keeps a part, and a weight is whole only while a layer computes with it.

ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054). Reading the value in a call of the model gathers the parts of
all replicas; the gradient of the whole value is summed over the replicas, and each replica receives its part. Each of
these two takes one collective call for all weights that are gathered together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.optim import keras_calls
from tfpar.parallel.division import FlatSplit
from tfpar.parallel.model_axis import Place, current_place
from tfpar.parallel.split import shape_of, split_of

import keras
import tensorflow as tf


def is_part(variable: keras.Variable, value: Any) -> bool:
    """Whether `value` is a part of a sharded weight, and the program of a replica is being traced."""
    split = split_of(variable)
    return (
        isinstance(split, FlatSplit)
        and current_place() is not None
        and tuple(value.shape) == (split.elements,) != split.shape
    )


def gathered(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the whole values of variables; all parts are gathered in one call.

    Args:
      variables: Any variables.
      values: For each variable, its value or a part `[S]` of it.
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
    """Returns a context in which sharded weights report their whole shape, because some layers read it."""
    splits = [(variable, split_of(variable)) for variable in variables] if current_place() else []
    return keras_calls.shapes_of_variables(
        [(variable, split.shape) for variable, split in splits if isinstance(split, FlatSplit)]
    )


def traced_whole(variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for tracing a call of the model by itself, outside a replica: nothing is gathered, and
    variables that are not whole here report their whole shape."""
    if current_place():
        return contextlib.nullcontext()
    return keras_calls.shapes_of_variables([(variable, shape_of(variable)) for variable in variables])


class Wholes:
    """The whole values that one call of a model has gathered so far, each once."""

    def __init__(self) -> None:
        self._known: dict[int, tf.Tensor] = {}

    def of(self, variable: keras.Variable, value: Any) -> Any:
        """Returns the value, or the whole value of which it is a part."""
        if value is None or not is_part(variable, value):
            return value
        if id(variable) not in self._known:
            self._known[id(variable)] = gathered([variable], [value])[0]
        return self._known[id(variable)]


def with_wholes(
    values: Mapping[int, tf.Tensor], variables: Sequence[keras.Variable], given: Sequence[tf.Tensor], after: Any
) -> dict[int, tf.Tensor]:
    """Returns values by `id` of the variable, with those of `variables` replaced by their whole values.

    Args:
      values: Values of any variables.
      variables: The variables of a block.
      given: For each variable of the block, its value or a part of it.
      after: Tensors that must be ready before anything is gathered: the inputs of the block, so that no block's weights
        are gathered before its turn.
    """
    with tf.control_dependencies(after):
        return {**values, **dict(zip(map(id, variables), gathered(variables, given), strict=True))}


def _gather(place: Place, parts: Sequence[tf.Tensor], splits: Sequence[Any]) -> list[tf.Tensor]:
    """Returns whole tensors, gathered from the parts of all replicas; a part's gradient is summed over all replicas."""
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

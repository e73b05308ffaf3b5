"""Updates of some of an optimizer's weights at a time, so that the state of the others need not be at hand."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.optim.optimizers import ELEMENTWISE, WHOLE_TENSORS, recreate
from tfpar.optim.pure_update import PureUpdate, apply_reached

import keras
import tensorflow as tf

# What they change for all weights, the count of steps and Nadam's product, does not depend on any weight.
_KNOWN = (*ELEMENTWISE, *WHOLE_TENSORS)


@dataclasses.dataclass(frozen=True)
class Block:
    """Weights that are updated together.

    Attributes:
      weights: Their indices among the weights that the optimizer was built with.
      slots: Indices, among the optimizer's variables, of the state that belongs to these weights alone.
    """

    weights: tuple[int, ...]
    slots: tuple[int, ...]


def blocks_of(optimizer: keras.optimizers.Optimizer, most_bytes: int) -> tuple[list[Block], list[int]]:
    """Cuts a built optimizer's weights into blocks, in order.

    Args:
      optimizer: Updates each weight by itself: it does not clip by the norm of all gradients.
      most_bytes: State of a block; that of a single weight may be larger.

    Returns:
      The blocks, and the indices of the variables that belong to no weight, such as the count of steps.

    Raises:
      ConfigError: There are several blocks, and the optimizer may combine weights of different ones in its state.
    """
    variables = optimizer.variables
    changed = _changed(optimizer)
    shared = _of_several(changed)
    slots = [[index for index in indices if index not in shared] for indices in changed]
    blocks: list[list[int]] = []
    size = 0
    for weight, own in enumerate(slots):
        needed = sum(_bytes(variables[index]) for index in own)
        if not blocks or size + needed > most_bytes:
            blocks.append([])
            size = 0
        blocks[-1].append(weight)
        size += needed
    made = [Block(tuple(block), tuple(index for weight in block for index in slots[weight])) for block in blocks]
    if len(made) > 1 and (part := _combining_part(optimizer, shared)):
        raise ConfigError(
            f"--offload=optimizer: {part} of {type(optimizer).__name__} may combine weights, which are updated block "
            "by block: results could change. Leave --offload out, or use an optimizer of Keras."
        )
    owned = {index for block in made for index in block.slots}
    return made, [index for index in range(len(variables)) if index not in owned]


def apply_block(
    optimizer: keras.optimizers.Optimizer,
    places: Sequence[int],
    state: Mapping[int, tf.Tensor],
    weights: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor | None],
    learning_rate: tf.Tensor | None = None,
) -> tuple[list[tf.Tensor], dict[int, tf.Tensor]]:
    """`pure_apply` for some weights.

    Args:
      optimizer: See `blocks_of`.
      places: Indices of the weights.
      state: Values of the optimizer's variables by index: those of the weights, and those that belong to none.
      weights: Values of the weights.
      gradients: Their gradients; None leaves a weight as it is.
      learning_rate: See `pure_apply`.

    Returns:
      New values of the weights, and of `state`.
    """
    trainable, variables = keras_internals.trainable_variables(optimizer), optimizer.variables
    chosen = [trainable[place] for place in places]
    keys = {id(variable): keras_internals.variable_key(optimizer, variable) for variable in trainable}
    view = keras_internals.view_of(optimizer, PureUpdate, learning_rate, _keys=keys, _beside=contextlib.nullcontext)
    mapping = [*zip(chosen, weights, strict=True), *((variables[index], value) for index, value in state.items())]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        apply_reached(view, gradients, chosen)
    new = [scope.get_current_value(variable) for variable in chosen]
    return new, {index: scope.get_current_value(variables[index]) for index in state}


def combining_part(optimizer: keras.optimizers.Optimizer) -> str:
    """The part of an optimizer that may combine several weights, as words for an error; empty if it has none.

    Args:
      optimizer: One of any class; a copy of it is tried on small weights.
    """
    if type(optimizer) in _KNOWN:
        return ""
    copy = recreate(optimizer)
    shapes = (8, 8), (8,), (8, 8)
    copy.build([keras.Variable(tf.zeros(shape), name=f"weight_{place}") for place, shape in enumerate(shapes)])
    return _combining_part(copy, _of_several(_changed(copy)))


def _of_several(changed: Sequence[Sequence[int]]) -> set[int]:
    """Indices of the variables that the updates of several weights change, from those that each weight's does."""
    counts = Counter(index for indices in changed for index in indices)
    return {index for index, count in counts.items() if count > 1}


def _combining_part(optimizer: keras.optimizers.Optimizer, shared: Collection[int]) -> str:
    """The part of an optimizer of another class than Keras' that may combine several weights; empty if there is none.

    Args:
      optimizer: A built one.
      shared: Indices of the variables that the updates of several weights change.
    """
    kind = type(optimizer)
    if kind in _KNOWN:
        return ""
    if all(kind.apply is not known.apply for known in _KNOWN):  # it is given all weights at once
        return "the method 'apply'"
    variables = [optimizer.variables[index] for index in sorted(shared)]
    return next((f"the variable {each.name!r}" for each in variables if each is not optimizer.iterations), "")


def _bytes(variable: keras.Variable) -> int:
    return tf.as_dtype(variable.dtype).size * math.prod(variable.shape)


def _changed(optimizer: keras.optimizers.Optimizer) -> list[list[int]]:
    """For each weight, the optimizer's variables that its update changes: from updates of one weight at a time, in a
    graph that never runs."""
    trainable, variables = keras_internals.trainable_variables(optimizer), optimizer.variables
    changed = []
    with tf.Graph().as_default():
        state = {index: tf.zeros(each.shape, each.dtype) for index, each in enumerate(variables)}
        for place, weight in enumerate(trainable):
            value = tf.zeros(weight.shape, weight.dtype)
            _, new = apply_block(optimizer, [place], state, [value], [value], tf.constant(0.0))
            changed.append([index for index in state if new[index] is not state[index]])
    return changed

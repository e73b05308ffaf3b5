"""The numbers that a model draws without a seed, `keras.random.normal(shape)`.

Keras (3.15) draws them from one generator per thread, whose state is a variable that belongs to no model: a pure call
would read it as a constant, so that every step drew the same numbers, and MirroredStrategy would make one for each
replica. In a call, `Draws` stands in for it. Its state is among the values of the call's scope, like those of the
model's own generators, so that stages and blocks that are computed again carry it with them.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from tfpar.optim import keras_calls
from tfpar.optim.keras_deferred import without_value

import keras
import tensorflow as tf

_PREVIOUS = "_tfpar_previous_draw"


@functools.cache
def draw_state() -> keras.Variable:
    """The variable for which scopes have the state of `Draws`."""
    return without_value("unseeded_draws", (2,), "uint32")


class Draws:
    """Draws seeds for operations without a seed. The first is the given one, and the following ones count up.

    Args:
      first: uint32 `[2]`.
    """

    def __init__(self, first: tf.Tensor) -> None:
        self._first = first
        self.outside = first  # the state where no scope has it, as in a loss

    def next(self, ordered: bool = True) -> tf.Tensor:
        """See `keras.random.SeedGenerator`."""
        del ordered
        state, scope = draw_state(), keras_calls.innermost_scope()
        value = None if scope is None else scope.get_current_value(state)
        previous = self.outside if value is None else value
        drawn = self.settled(previous)
        following = drawn + tf.constant([0, 1], tf.uint32)
        setattr(following, _PREVIOUS, previous)
        if scope is None or value is None:
            self.outside = following
        else:
            scope.add_update((state, following))
        return drawn

    def settled(self, value: tf.Tensor) -> tf.Tensor:
        """A value of the state in the graph that is being built; branches and loops of it may have made the value."""
        draws = 0
        while not is_reachable(value):
            value, draws = getattr(value, _PREVIOUS, self._first), draws + 1
        return value + tf.constant([0, draws], tf.uint32) if draws else value


def current_draws() -> Draws:
    """The `Draws` of this thread; without any, as in an evaluation, new ones, which are always the same."""
    generator = keras_calls.unseeded_generator()
    return generator if isinstance(generator, Draws) else Draws(tf.zeros([2], tf.uint32))


def drawing(seed: tf.Tensor | None = None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which operations without a seed draw from the seed of a step.

    Args:
      seed: Int32 `[2]`; None for `current_draws`, where the numbers do not matter or are to be the same each time.
    """
    return keras_calls.drawing_from(current_draws() if seed is None else Draws(tf.bitcast(seed, tf.uint32)))


def is_reachable(tensor: Any) -> bool:
    """Whether a tensor belongs to the graph being built or to one around it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(tensor, "graph", graph) is graph:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False

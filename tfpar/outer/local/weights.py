"""The two sets of weights of a worker that trains independently: its inner weights, and the outer weights of all.

The model's variables hold the inner weights while steps run, and the outer weights at the stops between them, where
evaluation, hooks and checkpoints read them. The other set is in the variables `outer`; the two sets are swapped without
a copy: an assignment passes a buffer on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpar.outer.local.parts import WHOLE, Parts, Tensors, squared_norm, value_here
from tfpar.parallel.pipeline.devices import beside
from tfpar.parallel.split import assign_whole, copies_of, copy_beside, peers_of, split_of

import keras
import numpy as np
import tensorflow as tf


class TwoSets:
    """Inner and outer weights, and the state that workers average, of one worker.

    Args:
      weights: The model's trainable weights, created under the strategy.
      state: The model's state that workers average: floating-point variables, such as batch statistics.
      strategy: The running strategy.
      parts: How a replica is divided.

    Attributes:
      model: The model's variables: weights, then state.
      outer: One variable for each of them, with the set that the model does not hold now.
      count: Number of weights among them.
      shown: Whether the model holds the outer weights instead of the inner ones.
    """

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        state: Sequence[keras.Variable],
        strategy: tf.distribute.Strategy,
        parts: Parts = WHOLE,
    ) -> None:
        self._strategy, self._parts = strategy, parts
        self.model = [*weights, *state]
        self.count = len(weights)
        with parts.scope(strategy):
            self.outer = [copy_beside(each, f"outer_{each.path.replace('/', '_')}") for each in self.model]
        self.shown = False
        self._swap = function(self._swap_all)
        self._norm = function(self._movement_norm)
        self.keep = function(functools.partial(self._copy, self.model, self.outer))
        self.take_back = function(functools.partial(self._copy, self.outer, self.model))

    @contextlib.contextmanager
    def showing_outer(self) -> Iterator[None]:
        """Returns a context in which the model has the outer weights."""
        swaps = not self.shown
        if swaps:
            self.toggle()
        yield
        if swaps and self.shown:
            self.toggle()

    def show_outer(self) -> None:
        """Puts the outer weights into the model."""
        if not self.shown:
            self.toggle()

    def show_inner(self) -> None:
        """Puts this worker's own weights into the model."""
        if self.shown:
            self.toggle()

    def toggle(self) -> None:
        """Swaps the two sets."""
        self._swap()
        self.shown = not self.shown

    def moved(self) -> float:
        """Returns the L2 norm of the movement of the weights that this worker counts; not finite if a weight or a state
        of this worker is not."""
        return float(self._norm().numpy())

    def inner_values(self) -> list[np.ndarray]:
        """Returns copies of this worker's own weights and state; see `value_here`."""
        return [*map(value_here, self.outer if self.shown else self.model)]

    def outer_values(self) -> list[np.ndarray]:
        """Returns copies of the outer weights and state; see `value_here`."""
        return [*map(value_here, self.model if self.shown else self.outer)]

    def assign_here(self, variable: keras.Variable, value: Any) -> None:
        """Assigns a result of `value_here` to this worker's copies of a variable, or to the parts of its devices."""
        if split_of(variable):
            if peers_of(variable):
                for part, own in zip(copies_of(variable), value, strict=True):
                    part.assign(tf.cast(own, part.dtype))
            else:
                assign_whole(variable, value)
            return
        for copy in self._strategy.experimental_local_results(variable.value):
            copy.assign(tf.cast(value, copy.dtype))

    def mend(self, variables: Sequence[keras.Variable]) -> None:
        """Sets non-finite values of an optimizer's state to 0; they would make the weights non-finite again."""
        for variable in variables:
            if tf.as_dtype(variable.dtype).is_floating:
                for copy in self._strategy.experimental_local_results(variable.value):
                    value = np.asarray(copy.numpy())
                    copy.assign(np.where(np.isfinite(value), value, np.zeros_like(value)))

    def squared_movement(self, places: Sequence[int]) -> tf.Tensor:
        """Returns the squared L2 norm of the movement of some weights, as far as this worker counts them."""
        return squared_norm(self._moved(places))

    def _movement_norm(self) -> tf.Tensor:
        weights, state = (self._moved(range(*ends)) for ends in ((0, self.count), (self.count, len(self.model))))
        others = [copy.read_value() for variable in self.model for copy in self._parts.not_counted(variable)]
        return tf.sqrt(squared_norm(weights)) + 0.0 * squared_norm([*state, *others])

    def _moved(self, places: Sequence[int]) -> Tensors:
        """The movements of the variables with these indices that this worker counts, by parts."""
        moved = []
        for place in places:
            model, outer = map(self._parts.counted, (self.model[place], self.outer[place]))
            for pair in zip(model, outer, strict=True):
                new, old = (copy.read_value() for copy in pair)
                with beside(new):
                    moved.append(tf.cast(new, tf.float32) - tf.cast(old, tf.float32))
        return moved

    def _swap_all(self) -> None:
        local = self._strategy.experimental_local_results
        for one, other in zip(self.model, self.outer, strict=True):
            for mine, theirs in zip(local(one.value), local(other.value), strict=True):
                values = theirs.read_value(), mine.read_value()
                with tf.control_dependencies(values):
                    mine.assign(values[0], read_value=False)
                    theirs.assign(values[1], read_value=False)

    def _copy(self, sources: Sequence[keras.Variable], targets: Sequence[keras.Variable]) -> None:
        local = self._strategy.experimental_local_results
        for source, target in zip(sources, targets, strict=True):
            for value, copy in zip(local(source.value), local(target.value), strict=True):
                copy.assign(value.read_value())


def function(called: Callable[..., Any]) -> Any:
    """Returns a `tf.function` without retracing warnings: TensorFlow 2.21 counts tracings of all objects together."""
    compiled = tf.function(called, autograph=False)
    compiled._omit_frequent_tracing_warning = True
    return compiled

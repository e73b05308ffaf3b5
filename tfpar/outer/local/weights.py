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

import keras
import numpy as np
import tensorflow as tf

Tensors = list[tf.Tensor]


class TwoSets:
    """Inner and outer weights, and the state that workers average, of one worker.

    Args:
      weights: The model's trainable weights, created under the strategy.
      state: The model's state that workers average: floating-point variables, such as batch statistics.
      strategy: The running strategy.

    Attributes:
      model: The model's variables: weights, then state.
      outer: One variable for each of them, with the set that the model does not hold now.
      count: Number of weights among them.
      shown: Whether the model holds the outer weights instead of the inner ones.
    """

    def __init__(
        self, weights: Sequence[keras.Variable], state: Sequence[keras.Variable], strategy: tf.distribute.Strategy
    ) -> None:
        self._strategy = strategy
        self.model = [*weights, *state]
        self.count = len(weights)
        with strategy.scope():
            self.outer = [_copy_of(variable) for variable in self.model]
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
        """Returns the L2 norm of the movement of this worker's weights; not finite if a weight or a state is not."""
        return float(self._norm().numpy())

    def inner_values(self) -> list[np.ndarray]:
        """Returns copies of this worker's own weights and state."""
        held = self.outer if self.shown else self.model
        return [np.array(variable.numpy(), copy=True, order="C") for variable in held]

    def outer_values(self) -> list[np.ndarray]:
        """Returns copies of the outer weights and state."""
        held = self.model if self.shown else self.outer
        return [np.array(variable.numpy(), copy=True, order="C") for variable in held]

    def assign_here(self, variable: keras.Variable, value: Any) -> None:
        """Assigns to this worker's copies of a variable."""
        for copy in self._strategy.experimental_local_results(variable.value):
            copy.assign(tf.cast(value, copy.dtype))

    def mend(self, variables: Sequence[keras.Variable]) -> None:
        """Sets non-finite values of an optimizer's state to 0; they would make the weights non-finite again."""
        for variable in variables:
            if tf.as_dtype(variable.dtype).is_floating:
                value = np.asarray(variable.numpy())
                self.assign_here(variable, np.where(np.isfinite(value), value, np.zeros_like(value)))

    def _movement_norm(self) -> tf.Tensor:
        pairs = zip(self._first(self.model), self._first(self.outer), strict=True)
        moved = [tf.cast(new, tf.float32) - tf.cast(old, tf.float32) for new, old in pairs]
        return l2_norm(moved[: self.count]) + 0.0 * l2_norm(moved[self.count :])

    def _first(self, variables: Sequence[keras.Variable]) -> Tensors:
        return [self._strategy.experimental_local_results(each.value)[0].read_value() for each in variables]

    def _swap_all(self) -> None:
        local = self._strategy.experimental_local_results
        for one, other in zip(self.model, self.outer, strict=True):
            for mine, theirs in zip(local(one.value), local(other.value), strict=True):
                values = theirs.read_value(), mine.read_value()
                with tf.control_dependencies(values):
                    mine.assign(values[0], read_value=False)
                    theirs.assign(values[1], read_value=False)

    def _copy(self, sources: Sequence[keras.Variable], targets: Sequence[keras.Variable]) -> None:
        for value, target in zip(self._first(sources), targets, strict=True):
            self.assign_here(target, value)


def function(called: Callable[..., Any]) -> Any:
    """Returns a `tf.function` without retracing warnings: TensorFlow 2.21 counts tracings of all objects together."""
    compiled = tf.function(called, autograph=False)
    compiled._omit_frequent_tracing_warning = True
    return compiled


def l2_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the L2 norm over all elements, float32 scalar; 0 if there are none."""
    if not tensors:
        return tf.zeros([])
    return tf.sqrt(tf.add_n([2.0 * tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors]))


def _copy_of(variable: keras.Variable) -> keras.Variable:
    name = variable.path.replace("/", "_")
    return keras.Variable(variable.numpy(), dtype=variable.dtype, trainable=False, name=f"outer_{name}")

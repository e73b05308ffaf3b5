"""Optimizers of a user's own: two that combine weights, and one that updates each by itself."""

from __future__ import annotations

import keras


class OfOneTotal(keras.optimizers.SGD):
    """Sums squares over all weights."""

    def build(self, variables):
        super().build(variables)
        self.total = self.add_variable((), name="total")

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.total, keras.ops.sum(gradient * gradient))
        super().update_step(gradient, variable, learning_rate)


class OfOwnApply(keras.optimizers.SGD):
    """Sees all gradients at once."""

    def apply(self, grads, trainable_variables=None):
        return super().apply(grads, trainable_variables)


class EachAlone(keras.optimizers.Adam):
    """Updates each weight by itself."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(-gradient, variable, learning_rate)

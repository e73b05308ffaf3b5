"""Yogi, an optimizer for the server of a federation that Keras does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.optim.keras_internals import variable_index

import keras
from keras import ops


@keras.saving.register_keras_serializable("tfpar")
class Yogi(keras.optimizers.Optimizer):
    """Adam whose second moment moves by an amount that does not depend on how far it is off.

    Zaheer et al. 2018, "Adaptive Methods for Nonconvex Optimization", in the form of Reddi et al. 2021, "Adaptive
    Federated Optimization", algorithm 2, without correction of the bias:

        m = beta_1 m + (1 - beta_1) g
        v = v - (1 - beta_2) g^2 sign(v - g^2)
        w = w - learning_rate m / (sqrt(v) + epsilon)

    `v` begins at `epsilon^2`.

    Args:
      learning_rate: Float, `LearningRateSchedule` or callable.
      beta_1: Decay of the first moment.
      beta_2: Decay of the second moment.
      epsilon: tau of Reddi et al., which bounds how much a small movement is enlarged.
      **kwargs: Keras' other optimizer arguments.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        epsilon: float = 1e-3,
        name: str = "yogi",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the moments."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")
        start = keras.initializers.Constant(self.epsilon**2)
        self._velocities = self.add_optimizer_variables(variables, "velocity", initializer=start)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable and its moments."""
        index = variable_index(self, variable)
        rate, gradient = ops.cast(learning_rate, variable.dtype), ops.cast(gradient, variable.dtype)
        momentum, velocity = self._momentums[index], self._velocities[index]
        square = ops.square(gradient)
        mean = momentum * self.beta_1 + (1.0 - self.beta_1) * gradient
        spread = velocity - (1.0 - self.beta_2) * square * ops.sign(velocity - square)
        self.assign(momentum, mean)
        self.assign(velocity, spread)
        self.assign_sub(variable, rate * mean / (ops.sqrt(spread) + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        """The arguments that make the same optimizer again."""
        own = {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}
        return super().get_config() | own

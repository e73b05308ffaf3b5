"""Layer-wise adaptive rate scaling, the one optimizer of the list that Keras does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar.optim.keras_internals import DecayInStep, is_decayed, variable_index

import keras
from keras import ops


@keras.saving.register_keras_serializable("tfpar")
class LARS(DecayInStep):
    """SGD with momentum whose learning rate is scaled layer by layer, for very large batches.

    You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1. For weights `w`,
    gradient `g`, learning rate `r`, weight decay `b`:

        trust    = trust_coefficient * |w| / (|g| + b * |w| + epsilon)     (1 where |w| or |g| is 0)
        velocity = momentum * velocity + r * trust * (g + b * w)
        w        = w - velocity

    Excluded variables (biases, normalisation) take plain momentum SGD: `trust` is 1 and `b` is 0 for them.

    Args:
      learning_rate: Float, `LearningRateSchedule` or callable; the global rate, far larger than for SGD.
      momentum: Decay of the velocity, in [0, 1).
      nesterov: Take the step that momentum is about to take.
      trust_coefficient: How far one update may move a layer, relative to its norm.
      epsilon: Keeps the trust ratio finite.
      weight_decay: Part of the trust ratio, as in the paper, not decoupled. None for none.
      exclude: Parts of variable paths, in lower case, that are excluded, e.g. `["bias", "norm"]`; variables
        given to `exclude_from_weight_decay` are excluded as well.
      **kwargs: Keras' other optimizer arguments (clipping, EMA, name).

    Raises:
      ValueError: `momentum` outside [0, 1) or a coefficient that is not positive.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        epsilon: float = 1e-9,
        weight_decay: float | None = None,
        exclude: Sequence[str] = ("bias", "norm", "bn"),
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            loss_scale_factor=loss_scale_factor,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
            **kwargs,
        )
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum={momentum} of LARS must be in [0, 1).")
        if trust_coefficient <= 0.0 or epsilon < 0.0:
            raise ValueError(
                f"trust_coefficient={trust_coefficient} of LARS must be positive and epsilon={epsilon} not negative."
            )
        self.momentum = momentum
        self.nesterov = nesterov
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon
        self.exclude = tuple(exclude)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates one velocity per variable, and decides which variables are rescaled."""
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")
        # Decided here: in `update_step` a variable is a tf.Variable, which has no path.
        self._adapted = tuple(
            is_decayed(self, variable) and not any(part in variable.path.lower() for part in self.exclude)
            for variable in variables
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable and its velocity."""
        index = variable_index(self, variable)
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        momentum = ops.cast(self.momentum, variable.dtype)
        if self._adapted[index]:
            decay = ops.cast(self.weight_decay or 0.0, variable.dtype)
            weight = ops.convert_to_tensor(variable)
            rate = rate * self._trust(weight, gradient, decay)
            gradient = gradient + decay * weight
        velocity = self._velocities[index]
        moved = velocity * momentum + rate * gradient
        self.assign(velocity, moved)
        self.assign_sub(variable, momentum * moved + rate * gradient if self.nesterov else moved)

    def _trust(self, weight: Any, gradient: Any, decay: Any) -> Any:
        weight_norm = ops.sqrt(ops.sum(ops.square(weight)))
        gradient_norm = ops.sqrt(ops.sum(ops.square(gradient)))
        ratio = self.trust_coefficient * weight_norm / (gradient_norm + decay * weight_norm + self.epsilon)
        return ops.where(ops.logical_and(weight_norm > 0, gradient_norm > 0), ratio, ops.ones_like(ratio))

    def get_config(self) -> dict[str, Any]:
        """The arguments that make the same optimizer again."""
        config = super().get_config()
        config.update(
            momentum=self.momentum,
            nesterov=self.nesterov,
            trust_coefficient=self.trust_coefficient,
            epsilon=self.epsilon,
            exclude=list(self.exclude),
        )
        return config

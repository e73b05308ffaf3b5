"""Outer optimizers, which compute new weights from the mean movement of workers that have trained independently.

The mean of `old - new` over the workers takes the place of a gradient (Reddi et al. 2021, algorithm 2: a
pseudo-gradient), so any Keras optimizer can be used.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.config import OuterConfig
from tfpar.parallel.split import keeps_slots_beside

import keras

# Reddi et al. 2021, table 1: tau, which limits the enlargement of small movements.
_ADAPTIVITY = 1e-3


def build(
    options: OuterConfig, variables: Sequence[keras.Variable], scope: str = "outer"
) -> keras.optimizers.Optimizer:
    """Creates and builds the outer optimizer of a configuration; call it in the strategy's scope.

    Args:
      options: The optimizer's name, learning rate and momentum.
      variables: The trainable weights.
      scope: First part of the names of the optimizer's variables.
    """
    rate, momentum = options.learning_rate, options.momentum
    optimizer: keras.optimizers.Optimizer
    if options.optimizer == "adam":
        optimizer = keras.optimizers.Adam(rate, beta_1=momentum, beta_2=0.99, epsilon=_ADAPTIVITY, name="outer_adam")
    else:
        nesterov = options.optimizer == "nesterov" and momentum > 0.0
        optimizer = keras.optimizers.SGD(rate, momentum=momentum, nesterov=nesterov, name="outer_sgd")
    keeps_slots_beside(optimizer)
    with keras.name_scope(scope, deduplicate=False):
        optimizer.build(list(variables))
    return optimizer

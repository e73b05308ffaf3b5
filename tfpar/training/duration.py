"""How many steps a run has."""

from __future__ import annotations

from tfpar.config import ConfigError, TrainConfig


def total_steps(config: TrainConfig, steps: int | None, epochs: float | None, steps_per_epoch: int) -> int:
    """Steps of the whole run, from `fit`'s arguments or else the configuration.

    Args:
      config: Says `steps` or `epochs` where neither argument is given.
      steps: Steps of the whole run.
      epochs: Passes over the examples, instead of `steps`.
      steps_per_epoch: Steps of one pass.

    Raises:
      ConfigError: Neither is given, or both are; less than one step.
    """
    if steps is None and epochs is None:
        steps, epochs = config.steps or None, config.epochs or None
    if (steps is None) == (epochs is None):
        raise ConfigError(f"give --steps or --epochs, one of them (got steps={steps}, epochs={epochs}).")
    total = steps if steps is not None else round((epochs or 0.0) * steps_per_epoch)
    if total < 1:
        raise ConfigError(f"--steps={steps}, --epochs={epochs}: that is {total} steps; at least one is needed.")
    return total

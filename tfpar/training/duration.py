"""How long a run is."""

from __future__ import annotations

from tfpar.config import ConfigError, TrainConfig


def total_steps(config: TrainConfig, steps: int | None, epochs: float | None, updates_per_epoch: int) -> int:
    """Updates in all, from `fit`'s arguments or else the configuration.

    Raises:
      ConfigError: Neither is given, or both are.
    """
    if steps is None and epochs is None:
        steps, epochs = config.steps or None, config.epochs or None
    if (steps is None) == (epochs is None):
        raise ConfigError(f"give --steps or --epochs, one of them (got steps={steps}, epochs={epochs}).")
    total = steps if steps is not None else round((epochs or 0.0) * updates_per_epoch)
    if total < 1:
        raise ConfigError(f"--steps={steps}, --epochs={epochs}: that is {total} updates; at least one is needed.")
    return total

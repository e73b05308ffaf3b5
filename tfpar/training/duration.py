"""How many steps a run has."""

from __future__ import annotations

import math
import numbers

from tfpar.config import ConfigError, ExperimentConfig, TrainConfig
from tfpar.optim import optimizers, schedules


def in_epochs(config: TrainConfig, steps: int | None, epochs: float | None) -> bool:
    """Whether the length of a run is given in epochs; arguments as for `total_steps`."""
    return epochs is not None or (steps is None and not config.steps)


def total_steps(config: TrainConfig, steps: int | None, epochs: float | None, steps_per_epoch: int) -> int:
    """Steps of the whole run, from `fit`'s arguments or else the configuration.

    Args:
      config: Its `steps` or `epochs` apply if neither argument is given.
      steps: Steps of the whole run.
      epochs: Passes over the examples, instead of `steps`.
      steps_per_epoch: Steps of one pass.

    Raises:
      ConfigError: Neither or both are given, a value is not a valid number, or the run has less than one step.
    """
    if steps is not None:
        steps = _whole(steps)
    if epochs is not None and (
        isinstance(epochs, bool) or not isinstance(epochs, numbers.Real) or not math.isfinite(epochs)
    ):
        raise ConfigError(f"fit(epochs={epochs!r}): give a number of passes over the examples, e.g. epochs=1.5.")
    if steps is None and epochs is None:
        steps, epochs = config.steps or None, config.epochs or None
    if (steps is None) == (epochs is None):
        raise ConfigError(f"give --steps or --epochs, one of them (got steps={steps}, epochs={epochs}).")
    total = steps if steps is not None else round((epochs or 0.0) * steps_per_epoch)
    if total < 1:
        length = f"--epochs={epochs:g}" if steps is None else f"--steps={steps}"
        raise ConfigError(f"{length}: that is {total} steps; at least one is needed.")
    return total


def check_profile(window: tuple[int, int] | None, total: int) -> None:
    """Refuses to profile steps that a run does not have.

    Args:
      window: First and last step to profile, or None.
      total: Steps of the whole run.

    Raises:
      ConfigError: The window ends after the run; the message suggests a window that the run has.
    """
    if window is not None and window[1] > total:
        first, last = min(window[0], max(total - 5, 1)), total
        raise ConfigError(
            f"--profile_steps={window[0]},{window[1]}: the run has {total} steps. Write e.g. "
            f"--profile_steps={first},{last}, or train longer (--steps, --epochs)."
        )


def planned_steps(config: ExperimentConfig, total: int) -> int:
    """The steps that a schedule and a profile refer to: those of the whole run.

    Args:
      config: The experiment.
      total: Steps of the whole run, or with `--watch`, whose run has no end, up to the end of the current delivery.
    """
    watches = config.incremental is not None and config.incremental.watch
    return max(config.train.steps, total) if watches else total


def check_length(config: ExperimentConfig, total: int) -> None:
    """Refuses a schedule or a profile that does not fit into the steps of the run.

    Args:
      config: The experiment.
      total: Steps of the whole run.
    """
    check_profile(config.monitor.profile_window(), total)
    peak = optimizers.scaled_learning_rate(config.optimizer, config.step_batch_size)
    schedules.build(config.schedule, peak=peak, total_steps=total)


def _whole(steps: object) -> int:
    number = isinstance(steps, numbers.Real) and not isinstance(steps, bool)
    if not number or not float(steps).is_integer():  # type: ignore[arg-type]
        raise ConfigError(f"fit(steps={steps!r}): give a whole number of steps, e.g. steps=100; or epochs=...")
    return int(steps)  # type: ignore[call-overload]

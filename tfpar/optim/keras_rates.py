"""Everything private of Keras that concerns the learning rate of an optimizer. `INTERNALS` is as in
`keras_internals.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim.keras_internals import Internal, set_untracked

import keras

INTERNALS = (
    Internal("_learning_rate", "Optimizer", "copying an optimizer", "the schedule or function itself, not its value"),
)


@contextlib.contextmanager
def without_schedule(optimizer: keras.optimizers.Optimizer) -> Iterator[Any]:
    """In this context, the optimizer has a number in place of a schedule or function of its learning rate.

    Its configuration can then be read: Keras (3.15) fails at schedules without `get_config`.

    Yields:
      The schedule or function; None if the optimizer has none.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        yield None
        return
    set_untracked(optimizer, _learning_rate=0.5)
    try:
        yield rate
    finally:
        set_untracked(optimizer, _learning_rate=rate)


def assigned_rate(optimizer: keras.optimizers.Optimizer) -> float | None:
    """The learning rate that was given or assigned to an optimizer as a number; None if it has a schedule or
    function."""
    with without_schedule(optimizer) as schedule:
        return None if schedule is not None else float(optimizer.learning_rate.numpy())


def config_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The configuration of an optimizer, in which a schedule or function of its learning rate is the object itself.

    Raises:
      ConfigError: `get_config` of its class fails.
    """
    try:
        with without_schedule(optimizer) as schedule:
            config = optimizer.get_config()
    except Exception as error:  # of the user's class
        kind = type(optimizer).__name__
        raise ConfigError(
            f"optimizer={kind}(...): its get_config() raised {type(error).__name__}: {error}. Make it return every "
            "argument of the constructor."
        ) from error
    return config if schedule is None else {**config, "learning_rate": schedule}


def schedule_config(schedule: Any) -> dict[str, Any] | None:
    """The configuration of a schedule or function of a learning rate; None if it has none that can be compared."""
    if getattr(schedule, "__name__", "") == "<lambda>":  # Keras describes its code, and the line where it is
        return None
    try:
        return keras.saving.serialize_keras_object(schedule)
    except Exception:  # of the user's class
        return None

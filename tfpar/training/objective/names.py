"""The error for names of losses and metrics that Keras does not know."""

from __future__ import annotations

import re
import types
from typing import Any

from tfpar.config import ConfigError, unknown_name

_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Names that `compile` takes in addition to the names of functions and classes.
_ABBREVIATIONS = {"mae", "mape", "mse", "msle"}
_CHOSEN_BY_LOSS = {"loss": {"crossentropy"}, "metrics": {"accuracy", "crossentropy"}}
_NOT_OF_OUTPUTS = {"mean", "metric", "sum"}  # metrics that take values, without labels


def unknown_in_keras(argument: str, value: Any, module: types.ModuleType, error: ValueError) -> ConfigError:
    """The error for a loss or metric that Keras does not know, with the nearest names.

    Args:
      argument: `loss` or `metrics`.
      value: What was given for it.
      module: `keras.losses` or `keras.metrics`.
      error: The error that the module's `get` raised.
    """
    if not isinstance(value, str):
        return ConfigError(f"{argument}={value!r} is not known to Keras: {error}")
    public = {_WORD_BOUNDARY.sub("_", name).lower() for name in dir(module)} - _NOT_OF_OUTPUTS
    known = {name for name in public if _is_enough(module, name)}
    return unknown_name(argument, value, known | _ABBREVIATIONS | _CHOSEN_BY_LOSS[argument])


def _is_enough(module: types.ModuleType, name: str) -> bool:
    """Whether the module's `get` accepts the name alone; it does not if the constructor of the class needs
    arguments."""
    try:
        return callable(module.get(name))
    except (ValueError, TypeError):
        return False

"""Errors that are meant for people: what the message names, and how a process ends with it.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration that cannot work. The message names flag, value and way out."""


class TrainingError(RuntimeError):
    """A run that cannot go on, though its configuration is sound. The message says what happened and the way out.

    Programs under `tfpar.config.flags.run` end with it as one line and the exit code.

    Attributes:
      exit_code: 1, or what tells launchers and schedulers more (`tfpar.process.exit_codes`).
    """

    exit_code = 1


def unknown_name(flag: str, value: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not in a registry, with the nearest suggestions.

    Args:
      flag: The flag or argument, e.g. `"--model"`.
      value: What was given.
      known: The names that would have been accepted.
    """
    names = sorted(known)
    near = difflib.get_close_matches(value, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return ConfigError(f"{flag}={value!r} is not known.{hint} Known: {', '.join(names)}.")

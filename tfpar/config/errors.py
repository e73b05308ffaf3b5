"""Errors for the user of a program, whose messages say what to do.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tfpar.process.exit_codes import USAGE_ERROR
from tfpar.process.suggestions import did_you_mean

# Names of all options, filled by `tfpar.config.experiment`, which imports this module.
OPTION_NAMES: set[str] = set()
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z_0-9]*)")


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the flag, its value, what is allowed and what to do.

    Messages name options as flags. For users of the Python API, a note of the exception (`add_note`) gives the keyword
    arguments; programs under `tfpar.config.flags.run` print only the message.

    Scripts that do not catch it print it as one line and exit with its code, once a `Trainer` or `tfpar.initialize` was
    called.

    Attributes:
      exit_code: 2, a usage error.
    """

    exit_code = USAGE_ERROR

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if note := _keywords(str(self)):
            self.add_note(note)


class TrainingError(RuntimeError):
    """A run that cannot continue, though its configuration is valid. The message says what happened and what to do.

    Programs under `tfpar.config.flags.run` print it as one line and exit with its code.

    Attributes:
      exit_code: 1, or a code that tells launchers and schedulers more (`tfpar.process.exit_codes`).
    """

    exit_code = 1


def _keywords(message: str) -> str:
    """How the options that a message names as flags are written in Python; empty if it names none."""
    names = [name for name in dict.fromkeys(_FLAG.findall(message)) if name in OPTION_NAMES]
    arguments = ", ".join(f"{name}=..." for name in names)
    return f"In Python, options are keyword arguments: {arguments}" if names else ""


def unknown_name(flag: str, value: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not in a registry, with the nearest suggestions.

    Args:
      flag: The flag or argument, e.g. `"--model"`.
      value: The unknown name.
      known: The names that are accepted.
    """
    names = sorted(known)
    hint = did_you_mean(value, names, most=3)
    return ConfigError(f"{flag}={value!r} is not known.{hint} Known: {', '.join(names)}.")

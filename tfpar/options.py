"""What an option of a configuration is: a typed field with its help, choices and bounds, checked when it is set."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import os
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot work. The message names flag, value and way out."""


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


def option(
    default: Any,
    help: str,  # noqa: A002 - the word absl uses for the same thing
    *,
    choices: Iterable[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field that can become a flag.

    Args:
      default: The default value; its annotation on the class gives the flag's type.
      help: One or two sentences for `--help`, with units.
      choices: The allowed values, for enumerations.
      minimum: Smallest allowed number.
      maximum: Largest allowed number.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices is not None else None,
        "minimum": minimum,
        "maximum": maximum,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the rooms' configurations: checks choices and bounds when built."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _typed(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            choices = field.metadata.get("choices")
            if choices and value is not None and value not in choices:
                raise unknown_name(f"--{field.name}", str(value), choices)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
                if (low is not None and not value >= low) or (high is not None and not value <= high):
                    bounds = " and ".join(
                        f"{word} {bound}" for word, bound in (("at least", low), ("at most", high)) if bound is not None
                    )
                    raise ConfigError(f"--{field.name}={value} is out of range: it must be {bounds}.")


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
    """`value` as the type the field is annotated with, where nothing is lost by that."""
    kinds = {"int": "a whole number", "float": "a finite number", "bool": "true or false", "str": "a string"}
    optional = isinstance(field.type, str) and field.type.endswith(" | None")
    kind = str(field.type).removesuffix(" | None")
    if kind not in kinds or (value is None and optional):
        return value
    if kind == "str" and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind in ("int", "float") and isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        if kind == "int" and number.is_integer():
            return operator.index(value) if isinstance(value, numbers.Integral) else int(number)
        if kind == "float" and math.isfinite(number):
            return number
    raise ConfigError(f"--{field.name}={value!r} is not {kinds[kind]}.")

"""What options are made of: values as text, fields that become flags, validation when built.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import operator
import os
from collections.abc import Iterable
from typing import Any

from tfpar.config.errors import ConfigError, unknown_name


def parse_arguments(flag: str, text: str, *, example: str, prefix: str = "") -> dict[str, Any]:
    """Parses `key=value,key=value` into keyword arguments.

    Values are read as JSON where they are JSON (`2`, `0.5`, `true`, `null`, `[64,128]`) and as
    plain strings otherwise, so `activation=gelu,widths=[64,128]` needs no quoting.

    Args:
      flag: The flag the text came from; named in errors.
      text: The text; empty means no arguments.
      example: What could be written instead; shown in errors.
      prefix: What stands before the text where the flag takes more than arguments; shown in errors.

    Returns:
      The keyword arguments in the order given.

    Raises:
      ConfigError: A part without `=`, an empty key, or a key given twice.
    """
    arguments: dict[str, Any] = {}
    given = prefix + text
    for part in _split_outside_brackets(text):
        key, separator, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not separator or not key.isidentifier():
            raise ConfigError(f"{flag}={given!r}: {part!r} is not key=value. Write e.g. {flag}={prefix}{example}.")
        if key in arguments:
            raise ConfigError(f"{flag}={given!r}: {key!r} is given twice.")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            lowered = value.lower()
            constants = {"true": True, "false": False, "none": None}
            arguments[key] = constants.get(lowered, value)
    return arguments


def _split_outside_brackets(text: str) -> list[str]:
    parts: list[str] = []
    depth, current = 0, ""
    for character in text:
        depth += (character in "[({") - (character in "])}")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    parts.append(current)
    return [part for part in parts if part.strip()]


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

"""The parts of a configuration: fields that become flags, validation when built, arguments as text.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from tfpar.config.errors import ConfigError, unknown_name


def parse_arguments(flag: str, text: str, *, example: str, prefix: str = "") -> dict[str, Any]:
    """Parses `key=value,key=value` into keyword arguments.

    Values are read as JSON where they are JSON (`2`, `0.5`, `true`, `null`, `[64,128]`) and as
    plain strings otherwise, so `activation=gelu,widths=[64,128]` needs no quoting.

    Args:
      flag: The flag the text came from; named in errors.
      text: The text; empty means no arguments.
      example: A correct value; shown in errors.
      prefix: The part of the flag's value before the text; shown in errors.

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
    words: Mapping[str, int] | None = None,
    numeral: bool = False,
    may_change_on_resume: bool = False,
    per_host: bool = False,
    used_by: Iterable[str] = (),
) -> Any:
    """A dataclass field that can become a flag.

    Args:
      default: The default value; its annotation on the class gives the flag's type.
      help: One or two sentences for `--help`, with units.
      choices: The allowed values, for enumerations.
      minimum: Smallest allowed number.
      maximum: Largest allowed number.
      words: Words that are allowed in place of a whole number, with the value that stands for each; it may be out of
        bounds.
      numeral: Whether a whole number may be given in place of the text of its digits, as in `Trainer(lora=8)`.
      may_change_on_resume: Whether a run may be resumed with another value. False for what defines what is trained:
        such a resume is refused.
      per_host: Whether the workers of a run may have different values, because the option belongs to a machine or to
        the chief alone. False: workers with different values are refused.
      used_by: The values of `--algorithm` that use the option; empty if all do.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices is not None else None,
        "minimum": minimum,
        "maximum": maximum,
        "words": dict(words or {}),
        "numeral": numeral,
        "may_change_on_resume": may_change_on_resume,
        "per_host": per_host,
        "used_by": tuple(used_by),
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigBase:
    """Base of the sections of a configuration: checks types, choices and bounds when it is built."""

    def __post_init__(self) -> None:
        section: type = type(self)
        annotations = _annotations(section)
        for field in dataclasses.fields(self):
            words, value = field.metadata.get("words") or {}, getattr(self, field.name)
            if isinstance(value, str) and value in words:
                value = words[value]
            if field.metadata.get("numeral") and isinstance(value, int) and not isinstance(value, bool):
                value = str(value)
            value = _converted(field.name, annotations[field.name], value, words)
            object.__setattr__(self, field.name, value)
            choices = field.metadata.get("choices")
            if choices and value is not None and value not in choices:
                raise unknown_name(f"--{field.name}", str(value), choices)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in words.values():
                low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
                if (low is not None and not value >= low) or (high is not None and not value <= high):
                    raise ConfigError(f"--{field.name}={value} is out of range: it must be {range_text(field)}.")


@functools.cache
def _annotations(section: type) -> dict[str, Any]:
    """Of each field; to evaluate their text takes longer than all checks."""
    return typing.get_type_hints(section)


def range_text(field: dataclasses.Field[Any]) -> str:
    """The bounds of an option in words, e.g. `at least 1`; empty if it has none."""
    bounds = (("at least", field.metadata.get("minimum")), ("at most", field.metadata.get("maximum")))
    return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)


_TYPE_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}


def _converted(name: str, annotation: Any, value: Any, words: Iterable[str]) -> Any:
    """`value` as the type that its option is annotated with, if that loses nothing.

    Args:
      name: The option's.
      annotation: Its annotation.
      value: What was given.
      words: What may be given besides; named in the error.

    Raises:
      ConfigError: It has another type, or loses something.
    """
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)  # as in `int | None`
    alternatives = typing.get_args(annotation) if union else (annotation,)
    kind = next((alternative for alternative in alternatives if alternative in _TYPE_NAMES), None)
    if kind is None or (value is None and type(None) in alternatives):
        return value
    if kind is str and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float) and isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        if kind is int and number.is_integer():
            return operator.index(value) if isinstance(value, numbers.Integral) else int(number)
        if kind is float and math.isfinite(number):
            return number
    raise ConfigError(f"--{name}={value!r} is not {' or '.join([_TYPE_NAMES[kind], *words])}.")

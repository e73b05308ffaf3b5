"""Parses `--exchange`: the name of an algorithm and its options."""

from __future__ import annotations

from typing import Any

from tfpar.config import ConfigError, parse_arguments, unknown_name
from tfpar.exchange import registry
from tfpar.exchange.registry import Algorithm, Spec


def parse(text: str, flag: str = "--exchange") -> Spec:
    """Reads a spec: `none`, `int4`, `int4:block=512,rounding=stochastic`, `topk:0.01`, `fp8:pattern=all_gather`.

    Args:
      text: Name, then after a colon options as `key=value`, separated by commas. One option of an algorithm may come
        first without its name, such as the share of elements that `topk` sends: `topk:0.01` is `topk:share=0.01`.
      flag: Where the text came from; named in errors.

    Raises:
      ConfigError: An unknown name or option, with suggestions, or an invalid value.
    """
    name, _, rest = text.partition(":")
    algorithm = registry.get(name, flag)
    try:
        values = _values(algorithm, text, rest, flag)
        options = algorithm.make_options(**values)
        options.check_given(values)
        return Spec(text, algorithm, options)
    except ConfigError as error:
        if str(error).startswith(flag):
            raise
        raise ConfigError(f"{flag}={text}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag}={text}: {error}") from error


def plain(name: str, **values: Any) -> Spec:
    """The spec of an algorithm with options given as values.

    Raises:
      ConfigError: An unknown name.
    """
    algorithm = registry.get(name)
    return Spec(name, algorithm, algorithm.make_options(**values))


def _values(algorithm: Algorithm, text: str, rest: str, flag: str) -> dict[str, Any]:
    """Options by name, from the text after the colon."""
    values: dict[str, Any] = {}
    first = algorithm.first_field
    if first is not None and "=" not in rest.partition(",")[0]:
        value, _, rest = rest.partition(",")
        if value:
            values[first.name] = first.metadata["read"](value)
    fields = [*([first] if first else []), *algorithm.fields]
    if not fields and rest:
        raise ConfigError(f"{flag}={text}: {algorithm.name} takes no options. Write {flag}={algorithm.name}.")
    prefix = text.removesuffix(rest) if rest else text
    given = parse_arguments(flag, rest, example=algorithm.example, prefix=prefix)
    for field in fields:
        alias = field.metadata["alias"]
        if alias in given:
            if field.name in given:
                raise ValueError(f"{alias} is another name for {field.name}; give one of them.")
            given[field.name] = given.pop(alias)
    if first is not None and first.name in given:
        if first.name in values:
            raise ValueError(f"{first.name} is given twice, the first time without its name; give it once.")
        values[first.name] = first.metadata["read"](str(given.pop(first.name)))
    known = [name for field in fields for name in (field.name, field.metadata["alias"]) if name]
    for key in given:
        if key not in known:
            raise unknown_name(f"{flag}={text}: option", key, known)
    return values | given

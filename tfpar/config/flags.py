"""absl flags made from the typed configuration of `tfpar.config`.

An experiment defines them once, runs its `main` through `run`, and reads the configuration back inside:

    flags.define(defaults={"dataset": "digits", "steps": 500})

    def main(_: list[str]) -> None:
        config = flags.experiment_config()
        ...

    if __name__ == "__main__":
        flags.run(main)

Everything about a flag - type, default, choices, bounds, help - comes from the dataclass field. --flagfile=FILE reads
flags from a file with one flag per line.
"""

from __future__ import annotations

import dataclasses
import functools
import logging as stdlib_logging
import re
import shutil
import sys
import textwrap
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfpar.config import flagfiles
from tfpar.config.errors import ConfigError, TrainingError, unknown_name
from tfpar.config.experiment import PROGRAM_SECTIONS, SECTIONS, ExperimentConfig, every_field
from tfpar.config.fields import range_text
from tfpar.process import logs
from tfpar.process.command_line import end_with_reader
from tfpar.process.exit_codes import USAGE_ERROR, PeerLostError, exit_peer_lost
from tfpar.process.suggestions import did_you_mean

from absl import app, flags, logging

_MODULE = "tfpar.config."  # prefix of the module name under which absl lists the flags of a section
_HELP_COLUMN = 30


def define(
    sections: Iterable[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    flag_values: flags.FlagValues = flags.FLAGS,
    *,
    options: Iterable[str] | None = None,
    rooms: Iterable[str] | None = None,
) -> None:
    """Defines a flag for every option of these sections.

    Args:
      sections: Names from `tfpar.config.SECTIONS`, by default all of them; or of `PROGRAM_SECTIONS`.
      defaults: Maps option names to this experiment's defaults, where they differ from those of the dataclasses.
      flag_values: Where to define the flags; by default among absl's global flags.
      options: Names of the options that the program uses; by default all of these sections.
      rooms: Deprecated name of `sections`.

    Raises:
      ConfigError: An unknown section or option, or a default that is not allowed.
    """
    if rooms is not None:
        warnings.warn("define(rooms=...) is deprecated; use sections=...", DeprecationWarning, stacklevel=2)
        sections = rooms
    remaining = dict(defaults or {})
    chosen = list(SECTIONS if sections is None else sections)
    known = SECTIONS | PROGRAM_SECTIONS
    for section in chosen:
        if section not in known:
            raise unknown_name("section", section, known)
    every = [field.name for section in chosen for field in dataclasses.fields(known[section])]
    used = set(every if options is None else options)
    for name in used - set(every):
        raise unknown_name("option", name, every)
    for section in chosen:
        fields = [field for field in dataclasses.fields(known[section]) if field.name in used]
        overrides = {field.name: remaining.pop(field.name) for field in fields if field.name in remaining}
        values = known[section](**overrides)  # validates the defaults
        types = typing.get_type_hints(known[section])
        for field in fields:
            flag = _flag(field, types[field.name], getattr(values, field.name))
            flags.DEFINE_flag(flag, flag_values, module_name=_MODULE + section)
    if remaining:
        raise unknown_name("default", next(iter(remaining)), [name for name in every if name in used])


def experiment_config(
    flag_values: flags.FlagValues = flags.FLAGS,
    *,
    preset: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> ExperimentConfig:
    """The configuration that the parsed flags describe. Sections without flags keep their defaults.

    Args:
      flag_values: The parsed flags.
      preset: From the values of all options, better ones for those that were not given.

    Raises:
      ConfigError: A value out of range, or values that contradict each other.
    """
    names = (field.name for field in every_field())
    options = {name: flag_values[name].value for name in names if name in flag_values}
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        # The one on the command line replaces the other that is merely this experiment's default.
        if _is_set(name, flag_values) and not _is_set(other, flag_values):
            options.pop(other, None)
    if preset is not None:
        options |= {name: value for name, value in preset(options).items() if not is_given(name, flag_values)}
    return ExperimentConfig.from_flat_dict(options)


def for_optimizer(name: str, *options: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A preset for a program some of whose defaults suit only its own default optimizer.

    Args:
      name: The program's default of `--optimizer`.
      options: Names of the options whose defaults suit it; with another optimizer they are those of all programs.
    """
    general = ExperimentConfig().as_flat_dict()
    return lambda values: {} if values["optimizer"] == name else {option: general[option] for option in options}


def is_given(name: str, flag_values: flags.FlagValues = flags.FLAGS) -> bool:
    """Whether an option was given on the command line or in a flagfile, even as 0."""
    return name in flag_values and flag_values[name].present > 0


def _is_set(name: str, flag_values: flags.FlagValues) -> bool:
    return is_given(name, flag_values) and bool(flag_values[name].value)


def run(main: Callable[[list[str]], Any], argv: Sequence[str] | None = None, *, program: str = "") -> None:
    """Parses the flags, calls `main`, and exits with what it returns.

    Like `absl.app.run`, but with readable errors: a wrong flag, a stray argument or a `ConfigError` from `main` prints
    one line on standard error, without a traceback, and exits with code 2; a `TrainingError` exits with its own code, a
    `PeerLostError` with 75. `--help` shows the flags of this experiment by section, `--helpfull` those of all modules.
    The absl log shows warnings and errors, and with --tensorflow_log information too.

    Args:
      main: Called with a list of the program's name, as absl does. `--help` shows the docstring of its module, and the
        flags that this module defines first.
      argv: The command line; `sys.argv` by default.
      program: How a user calls the program, if not as `python SCRIPT`: `"tfpar train image"`.
    """

    def guarded(arguments: list[str]) -> Any:
        try:
            return main(arguments)
        except (ConfigError, app.UsageError) as error:
            _fail(str(error))
        except TrainingError as error:
            _fail(str(error), code=error.exit_code)
        except PeerLostError as error:
            exit_peer_lost(error)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    app.define_help_flags()
    flags.DEFINE_flag(_HelpFlag(main.__module__, program))
    app.run(guarded, None if argv is None else list(argv), flags_parser=functools.partial(_parse, program=program))


def _parse(argv: list[str], program: str) -> list[str]:
    """Parses with absl; rewrites its error messages."""
    values = flags.FLAGS
    try:
        rest = values(flagfiles.resolved(argv))
    except flags.UnrecognizedFlagError as error:
        _fail(_unknown_flag(error.flagname, values, program))
    except ConfigError as error:
        _fail(str(error))
    except flags.Error as error:
        _fail(re.sub(r"^(flag |ERROR:: )", "", str(error)))  # absl's "flag --steps=x: ..."
    if len(rest) > 1:
        _fail(
            f"unexpected argument {rest[1]!r}. Flags are written --name=value, switches --name, --noname, --name=true."
        )
    if not values["verbosity"].using_default_value:
        logs.set_absl_verbosity(values["verbosity"].value)
    elif not ("tensorflow_log" in values and values["tensorflow_log"].value):
        values.verbosity = logging.WARNING  # app.run would raise it to INFO
        logging.get_absl_handler().addFilter(_is_relevant)
    return rest


def _is_relevant(record: stdlib_logging.LogRecord) -> bool:
    # TensorFlow Datasets 4.9 warns about its own deprecated properties, many times for every data set.
    return record.levelno >= stdlib_logging.ERROR or "tensorflow_datasets" not in record.pathname


def _fail(message: str, code: int = USAGE_ERROR) -> typing.NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def _unknown_flag(name: str, values: flags.FlagValues, program: str) -> str:
    if name.startswith("no") and name[2:] in values:
        return (
            f"--{name}: --{name[2:]} is not a switch; give it a value, as in --{name[2:]}={values[name[2:]].default}."
        )
    if name in _LAUNCHER:
        launcher = "tfpar launch" if program else "python -m tfpar.launch"
        return f"--{name} is the launcher's: {launcher} --workers=2 -- {program or sys.argv[0]} --flag=value ..."
    hint = did_you_mean(name, values, "--{}".format, most=3, cutoff=0.6)
    return f"unknown flag --{name}.{hint} --help lists the flags."


# Flags of `tfpar.launch`, which belong before `--`.
_LAUNCHER = (
    *("workers", "ps", "max_restarts", "min_workers", "restart_delay", "grace_period"),
    *("share_cores", "share_gpus", "log_dir", "hosts"),
)


# From fields to flags.


def _flag(field: dataclasses.Field[Any], kind: type, default: Any) -> flags.Flag:
    text = field.metadata["help"]
    choices = field.metadata["choices"]
    serializer = flags.ArgumentSerializer()
    if choices:
        return _ChoiceFlag(_Choice(choices), serializer, field.name, default, text)
    if kind is bool:
        switch = flags.BooleanFlag(field.name, default, text)
        switch.parser = _Switch()
        return switch
    bounds = range_text(field)
    remedy = f"Give one{f' that is {bounds}' * bool(bounds)}, e.g. --{field.name}={default or 1}."
    parsers: dict[type, flags.ArgumentParser] = {
        int: _Whole(remedy, field.metadata["words"]),
        float: _Number(remedy),
        str: flags.ArgumentParser(),
    }
    return flags.Flag(parsers[kind], serializer, field.name, default, text)


class _Whole(flags.IntegerParser):
    def __init__(self, remedy: str, words: Mapping[str, int]) -> None:
        super().__init__()
        self._remedy, self._words = remedy, words

    def convert(self, argument: Any) -> int:
        if argument in self._words:
            return self._words[argument]
        try:
            return super().convert(argument)
        except ValueError:
            others = "".join(f" or {word}" for word in self._words)
            raise ValueError(f"not a whole number{others}. {self._remedy}") from None


class _Number(flags.FloatParser):
    def __init__(self, remedy: str) -> None:
        super().__init__()
        self._remedy = remedy

    def convert(self, argument: Any) -> float:
        try:
            return super().convert(argument)
        except ValueError:
            raise ValueError(f"not a number. {self._remedy}") from None


class _Switch(flags.BooleanParser):
    def parse(self, argument: Any) -> bool:
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError("neither true nor false.") from None


class _Choice(flags.EnumParser):
    def __init__(self, choices: Iterable[str]) -> None:
        super().__init__(list(choices), case_sensitive=False)

    def parse(self, argument: str) -> str:
        try:
            return super().parse(argument)
        except ValueError:
            hint = did_you_mean(argument, self.enum_values, str)
            raise ValueError(f"must be one of {', '.join(self.enum_values)}.{hint}") from None


class _ChoiceFlag(flags.Flag):
    """One of several words. If `true` and `false` are among them, --name and --noname work too."""

    def __init__(self, parser: _Choice, *arguments: Any) -> None:
        super().__init__(parser, *arguments)
        self.boolean = {"true", "false"} <= set(parser.enum_values)

    def serialize(self) -> str:
        return f"--{self.name}={self.value}"


# Help.


class _HelpFlag(flags.BooleanFlag):
    """Replaces absl's --help, which lists only the flags of the main module and exits with 1."""

    def __init__(self, module: str, program: str) -> None:
        super().__init__("help", False, "Shows this help.", short_name="h", allow_override=True)
        self._module, self._program = module, program

    def parse(self, argument: Any) -> None:
        super().parse(argument)
        if self.value:
            end_with_reader()
            print(help_text(flags.FLAGS, self._module, self._program))
            sys.exit(0)


def help_text(values: flags.FlagValues, module: str = "__main__", program: str = "", width: int = 0) -> str:
    """What `--help` prints: the program's docstring, the flags it defines, then those of each section.

    Args:
      values: The flags.
      module: The module that has the program's docstring and defines its flags.
      program: How a user calls the program; by default `python SCRIPT`.
      width: Columns; 0 for the width of the terminal.
    """
    width = width or min(120, shutil.get_terminal_size().columns)
    doc = textwrap.dedent(sys.modules[module].__doc__ or "").strip()
    parts = [f"usage: {program or f'python {sys.argv[0]}'} [--flag=value ...]", *([doc] if doc else [])]
    modules = values.flags_by_module_dict()
    # absl lists the main module's flags under the path of the script.
    own = modules.get(sys.argv[0] if module == "__main__" else module, [])
    own_flags = [flag for flag in own if flag.name != "help"]
    if own_flags:
        parts.append(_section("this command" if program else "this script", "", own_flags, width))
    for section, kind in (PROGRAM_SECTIONS | SECTIONS).items():
        if _MODULE + section in modules:
            parts.append(_section(section, (kind.__doc__ or "").strip(), modules[_MODULE + section], width))
    parts.append(
        "--flagfile=FILE reads flags from a file, one per line, # starts a comment; of a flag given twice the last\n"
        "value counts. --helpfull shows the flags of absl and other modules too."
    )
    return "\n\n".join(parts)


def _section(title: str, summary: str, members: Iterable[flags.Flag], width: int) -> str:
    lines = [f"{title}: {summary}".rstrip(": ") + ("" if summary else ":")]
    for flag in members:
        default = {"True": "on", "False": "off", "": "empty"}.get(str(flag.default), str(flag.default))
        choices = getattr(flag.parser, "enum_values", None)
        value = "" if flag.boolean and not choices else f"={_metavar(flag)}"
        name = f"  --{'[no]' if not value else ''}{flag.name}{value}"
        text = " ".join(str(flag.help).split()) + (f" One of: {', '.join(choices)}." if choices else "")
        indent = " " * _HELP_COLUMN
        wrapped = textwrap.wrap(f"{text} Default: {default}.", width - _HELP_COLUMN)
        first = name.ljust(_HELP_COLUMN) if len(name) < _HELP_COLUMN else f"{name}\n{indent}"
        lines.append(first + f"\n{indent}".join(wrapped))
    return "\n".join(lines)


def _metavar(flag: flags.Flag) -> str:
    parser = flag.parser
    if isinstance(parser, flags.EnumParser):
        return "NAME"
    return "N" if isinstance(parser, flags.IntegerParser) else "X" if isinstance(parser, flags.FloatParser) else "TEXT"

"""Values of `--flagfile`: files, and recipes that come with tfpar, by name, as in `--flagfile=quickstart.flags`.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfpar.config.errors import ConfigError
from tfpar.process.suggestions import did_you_mean

# A link to experiments/recipes in a checkout, a separate folder in a wheel.
FOLDER = Path(__file__).with_name("recipes")

_FLAGS = ("--flagfile", "-flagfile")
_ASSIGNMENTS = ("--flagfile=", "-flagfile=")
_WAY_OUT = "Name a file with a flag per line, or a recipe that comes with tfpar:"


def names() -> list[str]:
    """The recipes that come with this installation, in alphabetical order."""
    return sorted(path.name for path in FOLDER.glob("*.flags"))


def resolved(argv: Sequence[str]) -> list[str]:
    """A command line with the lines of flagfiles in the places where `--flagfile` names these.

    Files may name others. A file comes before a recipe of the same name, and a name in a file is one beside that file
    rather than one in the current directory.

    Args:
      argv: A command line of absl flags.

    Raises:
      ConfigError: There is neither such a file nor such a recipe; a file that cannot be read, or that includes itself.
    """
    arguments: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "--":  # what follows are no flags
            return [*arguments, argument, *rest]
        if argument in _FLAGS and rest:
            arguments += _lines(rest.pop(0), ())
        elif argument.startswith(_ASSIGNMENTS):
            arguments += _lines(argument.partition("=")[2], ())
        else:
            arguments.append(argument)
    return arguments


def _lines(name: str, within: tuple[Path, ...]) -> list[str]:
    """The flags in a file, as absl reads them, and in those that it names.

    Args:
      name: As given; nothing is read if it is empty.
      within: The files that name each other down to this one.
    """
    name = name.strip()
    if not name:
        return []
    path = _find(name, within)
    where = _where(name, within)
    if path.resolve() in (each.resolve() for each in within):
        chain = " -> ".join(map(str, (*within, path)))
        raise ConfigError(f"{where}: the file includes itself ({chain}). Take one of these lines out.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise ConfigError(f"{where}: cannot be read ({reason}). {_WAY_OUT} {', '.join(names())}.") from error
    found: list[str] = []
    for line in lines:
        if not line.strip() or line.startswith(("#", "//")):
            continue
        if line.startswith(_ASSIGNMENTS):
            found += _lines(line.partition("=")[2], (*within, path))
        else:
            found.append(line.strip())
    return found


def _find(name: str, within: tuple[Path, ...]) -> Path:
    path = Path(name).expanduser()
    beside = [within[-1].parent / path] if within else []
    recipe = [FOLDER / name] if path.name == name else []
    for candidate in (*beside, path, *recipe):
        if candidate.exists():
            return candidate
    hint = did_you_mean(path.name, names(), "--flagfile={}".format)
    raise ConfigError(f"{_where(name, within)}: no such file.{hint} {_WAY_OUT} {', '.join(names())}.")


def _where(name: str, within: tuple[Path, ...]) -> str:
    return f"--flagfile={name}" + (f" in {within[-1]}" if within else "")

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


def names() -> list[str]:
    """The recipes that come with this installation, in alphabetical order."""
    return sorted(path.name for path in FOLDER.glob("*.flags"))


def resolved(argv: Sequence[str]) -> list[str]:
    """A command line in which `--flagfile` names files: the recipe's where a name is that of a recipe.

    A file in the current directory comes before a recipe of the same name.

    Args:
      argv: A command line of absl flags.

    Raises:
      ConfigError: There is neither such a file nor such a recipe.
    """
    arguments = list(argv)
    for index, argument in enumerate(arguments):
        if argument == "--":  # what follows are no flags
            break
        flag, separator, value = argument.partition("=")
        if flag not in ("--flagfile", "-flagfile"):
            continue
        if separator:
            arguments[index] = f"--flagfile={_resolve(value)}"
        elif index + 1 < len(arguments):
            arguments[index + 1] = _resolve(arguments[index + 1])
    return arguments


def _resolve(name: str) -> str:
    if not name or Path(name).expanduser().exists():
        return name
    recipe = FOLDER / name
    if Path(name).name == name and recipe.is_file():
        return str(recipe)
    hint = did_you_mean(Path(name).name, names(), "--flagfile={}".format)
    raise ConfigError(
        f"--flagfile={name}: no such file.{hint} Name a file with a flag per line, or a recipe that comes with tfpar: "
        f"{', '.join(names())}."
    )

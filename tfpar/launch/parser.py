"""The launcher's command line parser, and what can be wrong with the numbers and the script that it is given."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tfpar.process import command_line
from tfpar.process.command_line import seconds_problem
from tfpar.process.exit_codes import USAGE_ERROR
from tfpar.process.suggestions import did_you_mean


class Parser(command_line.Parser):
    """Says where the script belongs if it is among the launcher's own flags.

    Attributes:
      arguments: The command line before `--`.
    """

    arguments: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        is_script = bool(unknown) and (not unknown[0].startswith("-") or unknown[0] == "-m")
        if is_script and message.startswith("unrecognized arguments: "):
            own = [part for part in self.arguments if part not in unknown]
            command = " ".join([self.prog, *own, "--", *unknown])
            self.exit(USAGE_ERROR, f"error: put -- before the script: {command}\n")
        super().error(message)


def check_numbers(parser: Parser, values: argparse.Namespace) -> None:
    """Ends the program with an error if a number is out of range, or has no effect beside the others."""
    for name, least in {"workers": 1, **dict.fromkeys(("ps", "max_restarts", "min_workers"), 0)}.items():
        if getattr(values, name) < least:
            parser.error(f"--{name}={getattr(values, name)} must be at least {least}.")
    for name in ("restart_delay", "grace_period"):
        value = getattr(values, name)
        if value is not None and (problem := seconds_problem(f"--{name}", value)):
            parser.error(problem)
    if values.min_workers > values.workers:
        parser.error(f"--min_workers={values.min_workers} is more than --workers={values.workers}.")
    if values.min_workers and values.ps:
        parser.error("--min_workers is for workers that train together; leave it out with --ps.")
    if values.min_workers and values.max_restarts < 2:
        parser.error(
            f"--min_workers={values.min_workers} has no effect with --max_restarts={values.max_restarts}: a worker is "
            "left out when it fails in a restart, too. Give at least --max_restarts=2."
        )
    if values.restart_delay is not None and not values.max_restarts:
        parser.error(
            f"--restart_delay={values.restart_delay:g} has no effect with --max_restarts=0. Give --max_restarts=1 or "
            "more, or leave it out."
        )


def script_problem(command: Sequence[str]) -> str | None:
    """What is wrong with a command `SCRIPT ...` or `-m MODULE ...`; None if nothing is."""
    if command[0] == "-m":
        if len(command) < 2:
            return "-m needs the name of a module."
        return (
            None if _has_module(top := command[1].split(".")[0]) else f"no module named {top!r} (from -m {command[1]})."
        )
    script = Path(command[0])
    if re.fullmatch(r"python[\d.]*", script.name) and not script.is_dir():
        return f"workers run the launcher's Python: leave {script} out, as in -- {' '.join(command[1:]) or 'train.py'}."
    if script.is_file() or (script / "__main__.py").is_file():
        return None
    if command[0].startswith("-"):
        return f"the script must come first after --, found the flag {command[0]}."
    names = [path.name for path in script.parent.glob("*.py")]  # none if there is no such folder
    return f"no such script: {script}." + did_you_mean(script.name, names, f"{script.parent}/{{}}".format, cutoff=0.6)


def _has_module(name: str) -> bool:
    """Whether `python -m` in the working directory, which a console script does not search, finds a module."""
    here = importlib.machinery.PathFinder.find_spec(name, [os.getcwd()])
    return here is not None or importlib.util.find_spec(name) is not None

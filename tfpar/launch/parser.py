"""The launcher's command line parser."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from tfpar.process.exit_codes import USAGE_ERROR


class Parser(argparse.ArgumentParser):
    """Errors without the usage block, and with suggestions for misspelt flags.

    Attributes:
      arguments: The command line before `--`.
    """

    arguments: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if message.startswith("unrecognized arguments: "):
            flag = unknown[0].split("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.5)
            message = f"unknown argument {flag}." + (f" Did you mean {near[0]}?" if near else "")
            if not flag.startswith("-") or flag == "-m":
                own = [part for part in self.arguments if part not in unknown]
                command = " ".join([self.prog, *own, "--", *unknown])
                message = f"put -- before the script: {command}"
                self.exit(USAGE_ERROR, f"error: {message}\n")
        wrong = re.fullmatch(r"argument (--\w+): invalid (int|float) value: '(.*)'", message)
        if wrong:
            flag, kind, value = wrong.groups()
            message = f"{flag}={value} is not a {'whole ' * (kind == 'int')}number; give one, as in {flag}=2."
        self.exit(USAGE_ERROR, f"error: {message} See {self.prog} --help.\n")

"""The launcher's command line parser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from tfpar.process import command_line
from tfpar.process.exit_codes import USAGE_ERROR


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

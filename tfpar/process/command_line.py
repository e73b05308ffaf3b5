"""A parser of command lines whose errors are one line, for the programs that need no TensorFlow to read them."""

from __future__ import annotations

import argparse
import re
import signal
from typing import NoReturn

from tfpar.process.exit_codes import USAGE_ERROR
from tfpar.process.suggestions import did_you_mean

_MOST_SECONDS = 1_000_000  # 11 days; Linux takes milliseconds for `poll` as an int, 24 days


def seconds_problem(flag: str, value: float) -> str | None:
    """What is wrong with a number of seconds to wait; None if nothing is."""
    if 0 <= value <= _MOST_SECONDS:
        return None
    return f"{flag}={value:g} must be at least 0 and at most {_MOST_SECONDS} seconds."


def end_with_reader() -> None:
    """Makes this program end without a traceback once nobody reads its output, as in `| head`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class Parser(argparse.ArgumentParser):
    """Errors without the usage block, and with suggestions for misspelt flags."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ").split() or ["''"]  # an empty argument
            flag = unknown[0].split("=")[0]
            message = f"unknown argument {flag}.{did_you_mean(flag, self._option_string_actions, str)}"
        wrong = re.fullmatch(r"argument (--\w+): invalid (int|float) value: '(.*)'", message)
        if wrong:
            flag, kind, value = wrong.groups()
            message = f"{flag}={value} is not a {'whole ' * (kind == 'int')}number; give one, as in {flag}=2."
        end = "" if message.endswith((".", "?")) else "."
        self.exit(USAGE_ERROR, f"error: {message}{end} See {self.prog} --help.\n")

"""`python -m tfpar.cluster`: prints the cluster that this process finds in its environment, as others see it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfpar.cluster.info import current
from tfpar.config import ConfigError
from tfpar.process.command_line import Parser, end_with_reader
from tfpar.process.exit_codes import USAGE_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Prints this process's place and the address of every task; returns the exit code.

    Args:
      argv: The command line; by default that of the process.
    """
    Parser(prog="python -m tfpar.cluster", description=__doc__, allow_abbrev=False).parse_args(argv)
    try:
        info = current()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    end_with_reader()
    print(info.describe())
    for place, address in enumerate(info.server_addresses):
        marker = "  (this process)" if address == info.address else ""
        print(f"  {info.server_name(place)}  {address}{marker}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Lists the possible values of `--exchange`: all algorithms with their options, and the defaults.

python -m tfpar.exchange
"""

from __future__ import annotations

from tfpar.exchange import registry
from tfpar.process.command_line import Parser, end_with_reader

if __name__ == "__main__":
    Parser(prog="python -m tfpar.exchange", description=__doc__, allow_abbrev=False).parse_args()
    end_with_reader()
    print(registry.help_text())

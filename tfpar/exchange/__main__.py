"""Lists the possible values of `--exchange`: all algorithms with their options, and the defaults.

python -m tfpar.exchange
"""

from __future__ import annotations

from tfpar.exchange import registry
from tfpar.process.command_line import Parser

if __name__ == "__main__":
    Parser(prog="python -m tfpar.exchange", description=__doc__, allow_abbrev=False).parse_args()
    print(registry.help_text())

"""Lists the possible values of `--exchange`: all algorithms with their options, and the defaults.

python -m tfpar.exchange
"""

from __future__ import annotations

from tfpar.exchange import registry

if __name__ == "__main__":
    print(registry.help_text())

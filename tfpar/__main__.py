"""Entry point of `python -m tfpar`, which is what the console command `tfpar` runs."""

import sys

from tfpar.commands.cli import main

sys.exit(main())

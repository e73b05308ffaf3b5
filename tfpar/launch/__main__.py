"""Entry point of `python -m tfpar.launch`."""

import sys

from tfpar.launch.cli import main

sys.exit(main())

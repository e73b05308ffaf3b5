"""Entry point of `python -m tfpar.doctor`."""

import sys

from tfpar.doctor.cli import main

sys.exit(main())

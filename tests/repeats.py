"""Cases that show at another size, or in another way, what a case beside them shows, and the longest of the others.

They take a good part of the time of all tests. `make test` leaves them out, like everything marked `proof`; `make
proofs` runs them. `repeats.txt` has the id of each in a line, sorted.
"""

from __future__ import annotations

import pathlib

FILE = pathlib.Path(__file__).with_suffix(".txt")


def repeats() -> set[str]:
    """The ids of these cases."""
    return set(FILE.read_text().splitlines())

"""What a user may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def did_you_mean(
    name: str, known: Iterable[str], show: Callable[[str], str] = repr, *, most: int = 1, cutoff: float = 0.5
) -> str:
    """A question that names the nearest of the names that exist, after a space; empty if none is near.

    Args:
      name: The name that was given.
      known: The names that exist.
      show: How a name is written.
      most: How many are named at most.
      cutoff: How near they must be, from 0 to 1.
    """
    folded: dict[str, str] = {}  # so that INT8 is near int8
    for one in known:
        folded.setdefault(one.casefold(), one)
    near = [folded[one] for one in difflib.get_close_matches(name.casefold(), folded, n=most, cutoff=cutoff)]
    return f" Did you mean {' or '.join(map(show, near))}?" if near else ""

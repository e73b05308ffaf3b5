"""Lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def listed(parts: Sequence[str], most: int = 8, separator: str = ", ") -> str:
    """The first parts of a list as text, and how many more there are.

    Args:
      parts: All parts.
      most: How many are shown.
      separator: What separates them: "; " where parts contain commas.
    """
    more = len(parts) - most
    last = f"{separator.strip(', ')} and {more} more" if more > 0 else ""
    return separator.join(parts[:most]) + last

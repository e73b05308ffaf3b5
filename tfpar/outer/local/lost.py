"""Workers whose weights are no longer finite: they contribute nothing to a round, and only a few times in a row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tfpar.config import TrainingError

_log = logging.getLogger(__name__)

# Consecutive exchanges without the contribution of a worker after which the run ends.
_AT_MOST = 3


class LostWorkers:
    """Counts consecutive exchanges to which a worker contributed nothing.

    Args:
      reports: Whether this process prints warnings.
    """

    def __init__(self, *, reports: bool) -> None:
        self._reports = reports
        self._in_a_row = 0

    def reset(self) -> None:
        """Sets the count to 0."""
        self._in_a_row = 0

    def note(self, lost: Sequence[int], step: int, what: str = "round") -> None:
        """Records one exchange.

        Args:
          lost: Ranks of the workers that contributed nothing.
          step: Steps done.
          what: What was exchanged, for messages.

        Raises:
          TrainingError: It was the third in a row.
        """
        self._in_a_row = self._in_a_row + 1 if lost else 0
        if not lost:
            return
        who = f"worker{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        text = f"the weights of {who} were not finite at the end of the {what} at step {step}"
        if self._in_a_row >= _AT_MOST:
            raise TrainingError(
                f"{text}, {self._in_a_row} {what}s in a row. Lower --learning_rate, give --clip_norm, or check the "
                "examples of these workers."
            )
        if self._reports:
            _log.warning("%s: it contributes nothing to the exchange, and continues from the outer weights", text)

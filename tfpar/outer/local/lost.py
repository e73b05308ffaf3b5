"""Workers whose weights are no longer finite: they give nothing to a round, and may not do so again and again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tfpar.config import TrainingError

_log = logging.getLogger(__name__)

# Exchanges in a row to which a worker gives nothing before the run ends.
_AT_MOST = 3


class LostWorkers:
    """Counts exchanges in a row to which some worker had nothing to give.

    Args:
      reports: Whether this process prints warnings.
    """

    def __init__(self, *, reports: bool) -> None:
        self._reports = reports
        self._in_a_row = 0

    def reset(self) -> None:
        """Starts to count again."""
        self._in_a_row = 0

    def note(self, lost: Sequence[int], step: int, what: str = "round") -> None:
        """Takes note of one exchange.

        Args:
          lost: Ranks of the workers that had nothing to give.
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
                f"{text}, {self._in_a_row} {what}s in a row. Lower --learning_rate, give --clip_norm, or look at the "
                "examples of these workers."
            )
        if self._reports:
            _log.warning("%s: it has nothing to give, and goes on from the weights of all", text)

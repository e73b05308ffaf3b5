"""How many local steps make exchanges take a given share of the time: `--local_steps=auto`."""

from __future__ import annotations

import dataclasses
import math

# Rounds that are measured are this long. The first of them, which traces the exchange, does not count.
TRIAL_STEPS = 10
TRIAL_ROUNDS = 3
# No round is longer: the weights of workers would drift apart for the sake of an exchange that is dear.
LONGEST = 1000


@dataclasses.dataclass
class Pace:
    """What steps and exchanges have taken, the same on every worker.

    Attributes:
      steps: Steps that have been timed.
      step_seconds: Their time, in seconds.
      rounds: Exchanges done since the start; the first is not timed.
      exchange_seconds: The shortest of the others, in seconds: what else the machines do only adds to it.
    """

    steps: int = 0
    step_seconds: float = 0.0
    rounds: int = 0
    exchange_seconds: float = math.inf
    _calls: int = 0

    def note_steps(self, steps: int, seconds: float) -> None:
        """Takes note of a call of several steps; the first one compiles, and does not count.

        Args:
          steps: How many.
          seconds: The mean of what they took on each worker.
        """
        self._calls += 1
        if self._calls > 1:
            self.steps += steps
            self.step_seconds += seconds

    def note_exchange(self, seconds: float) -> None:
        """Takes note of an exchange.

        Args:
          seconds: What it took on the slowest worker, once all had begun.
        """
        self.rounds += 1
        if self.rounds > 1:
            self.exchange_seconds = min(self.exchange_seconds, seconds)

    @property
    def complete(self) -> bool:
        """Whether enough has been measured."""
        return self.rounds >= TRIAL_ROUNDS and self.steps > 0

    def local_steps(self, share: float) -> int:
        """The smallest H with which exchanges take no more than a share of the time.

        With S seconds a step and E an exchange, the share of the time is `E / (E + H * S)`.

        Args:
          share: Of the time, between 0 and 1.
        """
        step = max(self.step_seconds / self.steps, 1e-9)
        return min(max(math.ceil(self.exchange_seconds * (1.0 - share) / (share * step)), 1), LONGEST)

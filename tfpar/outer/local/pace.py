"""Chooses the number of local steps so that exchanges take a given share of the time: `--local_steps=auto`."""

from __future__ import annotations

import dataclasses
import math

# The length and number of the rounds that are measured. The first one traces the exchange and is not counted.
TRIAL_STEPS = 10
TRIAL_ROUNDS = 3
# The longest round: in longer ones the weights of the workers would drift apart.
LONGEST = 1000


@dataclasses.dataclass
class Pace:
    """The measured times of steps and exchanges, the same on every worker.

    Attributes:
      steps: Number of timed steps.
      step_seconds: Total time of these steps, in seconds.
      rounds: Number of exchanges since the start; the first is not timed.
      exchange_seconds: Time of the shortest timed exchange, in seconds: other load on the machines only adds time.
    """

    steps: int = 0
    step_seconds: float = 0.0
    rounds: int = 0
    exchange_seconds: float = math.inf
    _calls: int = 0

    def note_steps(self, steps: int, seconds: float) -> None:
        """Records a call of several steps; the first call compiles and is not counted.

        Args:
          steps: Number of steps.
          seconds: Their time, averaged over the workers.
        """
        self._calls += 1
        if self._calls > 1:
            self.steps += steps
            self.step_seconds += seconds

    def note_exchange(self, seconds: float) -> None:
        """Records an exchange.

        Args:
          seconds: Its time on the slowest worker, counted from when all workers had begun.
        """
        self.rounds += 1
        if self.rounds > 1:
            self.exchange_seconds = min(self.exchange_seconds, seconds)

    @property
    def complete(self) -> bool:
        """Whether enough has been measured."""
        return self.rounds >= TRIAL_ROUNDS and self.steps > 0

    def local_steps(self, share: float) -> int:
        """Returns the smallest H with which exchanges take at most `share` of the time.

        With S seconds per step and E seconds per exchange, their share of the time is `E / (E + H * S)`.

        Args:
          share: The share of the time, between 0 and 1.
        """
        step = max(self.step_seconds / self.steps, 1e-9)
        return min(max(math.ceil(self.exchange_seconds * (1.0 - share) / (share * step)), 1), LONGEST)

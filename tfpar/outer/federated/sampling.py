"""Which clients take part in a round, and in which order each sees its examples: pure functions of seed and round."""

from __future__ import annotations

import dataclasses

import numpy as np

_SAMPLE, _ORDER = 0x5A3F, 0x0DE5  # apart from other draws with the same seed


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """How the clients of a round are drawn.

    Attributes:
      seed: `--seed`.
      clients: Clients of the population.
      per_round: Clients of a round; with `poisson`, in the mean.
      kind: `fixed`: as many distinct clients in every round, every set of them with the same probability. `poisson`:
        each client independently with probability `per_round / clients`.
      dropout: Probability that a client that was drawn never answers.
    """

    seed: int
    clients: int
    per_round: int
    kind: str = "fixed"
    dropout: float = 0.0

    def round(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The clients of a round.

        Args:
          number: Of the round, from 0.

        Returns:
          int64, ascending: those that take part, and those that were drawn and drop out.
        """
        generator = np.random.default_rng([_SAMPLE, self.seed, number])
        if self.kind == "poisson":
            drawn = np.flatnonzero(generator.random(self.clients) < self.per_round / self.clients)
        else:
            drawn = np.sort(generator.choice(self.clients, self.per_round, replace=False))
        lost = generator.random(len(drawn)) < self.dropout
        return drawn[~lost], drawn[lost]

    def most(self, rounds: int) -> int:
        """The largest number of clients that take part in one of the first rounds of that number, at least 1."""
        if self.kind == "fixed":
            return self.per_round
        return max(1, *(len(self.round(number)[0]) for number in range(rounds)))

    @property
    def expected(self) -> float:
        """How many clients take part in a round in the mean."""
        return self.per_round * (1.0 - self.dropout)


def local_order(
    seed: int, number: int, client: int, examples: int, *, epochs: int, batch: int, shuffle: bool, fill: bool = False
) -> np.ndarray:
    """The batches of a client in a round.

    Args:
      seed: `--seed`.
      number: Of the round.
      client: Number of the client.
      examples: How many it has.
      epochs: Passes over them, each in a different order.
      batch: Examples of a step.
      shuffle: Whether orders are random.
      fill: Whether the last batch of a pass is filled with its first examples, in place of nothing.

    Returns:
      int32 `[steps, batch]`: places among the client's examples. The last batch of a pass may be short: -1 follows,
      unless it is filled.
    """
    steps = -(-examples // batch)
    table = np.full([epochs, steps * batch], -1, np.int32)
    generator = np.random.default_rng([_ORDER, seed, number, client])
    for row in table:
        order = generator.permutation(examples) if shuffle else np.arange(examples)
        row[:examples] = order
        if fill:
            row[:] = np.resize(order, len(row))
    return table.reshape([epochs * steps, batch])

"""Draws the clients of a round, and the order in which each uses its examples: pure functions of seed and round."""

from __future__ import annotations

import dataclasses

import numpy as np

_SAMPLE, _ORDER = 0x5A3F, 0x0DE5  # separate these draws from others with the same seed


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """The method that draws the clients of a round.

    Attributes:
      seed: `--seed`.
      clients: Number of clients in the population.
      per_round: Number of clients in a round; the mean number with `poisson`.
      kind: `fixed`: `per_round` distinct clients in every round, all sets with the same probability. `poisson`: each
        client independently with probability `per_round / clients`.
      dropout: Probability that a drawn client never replies.
    """

    seed: int
    clients: int
    per_round: int
    kind: str = "fixed"
    dropout: float = 0.0

    def round(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws the clients of a round.

        Args:
          number: Number of the round, from 0.

        Returns:
          The clients that take part, and the clients that were drawn but drop out; both int64, ascending.
        """
        generator = np.random.default_rng([_SAMPLE, self.seed, number])
        if self.kind == "poisson":
            drawn = np.flatnonzero(generator.random(self.clients) < self.per_round / self.clients)
        else:
            drawn = np.sort(generator.choice(self.clients, self.per_round, replace=False))
        lost = generator.random(len(drawn)) < self.dropout
        return drawn[~lost], drawn[lost]

    def most(self, rounds: int) -> int:
        """Returns the largest number of clients that take part in one of the first `rounds` rounds, at least 1."""
        if self.kind == "fixed":
            return self.per_round
        return max(1, *(len(self.round(number)[0]) for number in range(rounds)))

    @property
    def expected(self) -> float:
        """Mean number of clients that take part in a round."""
        return self.per_round * (1.0 - self.dropout)


def local_order(
    seed: int, number: int, client: int, examples: int, *, epochs: int, batch: int, shuffle: bool, fill: bool = False
) -> np.ndarray:
    """Returns the batches of a client in a round.

    Args:
      seed: `--seed`.
      number: Number of the round.
      client: Number of the client.
      examples: Number of the client's examples.
      epochs: Number of passes over them, each in a different order.
      batch: Examples per step.
      shuffle: Whether the order is random.
      fill: Whether the last batch of a pass, if short, is filled with the first examples of the pass.

    Returns:
      int32 `[steps, batch]`: indices among the client's examples; -1 where a short batch is not filled.
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

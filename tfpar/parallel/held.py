"""Variables that only some workers of a pipeline hold: those with the stages whose layers use them."""

from __future__ import annotations

import dataclasses

from tfpar.parallel.division import Split
from tfpar.parallel.replica_peers import ReplicaPeers

import keras
import numpy as np

_ATTRIBUTE = "tfpar_held"


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """The location of a variable that some workers of a replica hold; on the others it has no elements.

    Attributes:
      shape: Shape of the whole variable, which the devices of a holder may divide.
      ranks: Ranks, among the workers with the stages of a replica, of those that hold it, ascending.
      peers: The workers with the stages of a replica.
      split: Its division over the devices of a holder, or of several workers, each of which is a holder for the workers
        with the same part.
      layer_peers: The workers that divide the same layers, if a worker has not all parts of its layers.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    peers: ReplicaPeers
    split: Split | None = None
    layer_peers: ReplicaPeers | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what a device of a holder has."""
        return self.split.part_shape(self.shape) if self.split else self.shape

    @property
    def absent_shape(self) -> tuple[int, ...]:
        """Shape of the variable on a worker that does not hold it. An optimizer may tell matrices from others."""
        return (0,) * max(len(self.shape), 1)

    @property
    def here(self) -> bool:
        """Whether this worker holds the variable."""
        return self.peers.rank in self.ranks

    @property
    def counts_here(self) -> bool:
        """Whether this worker counts the variable: exactly one of its holders among `peers` does."""
        return self.peers.rank == self.ranks[0]

    @property
    def saved_here(self) -> bool:
        """Whether this worker saves the variable, or its part of it."""
        return self.counts_here and (self.split is not None or self.layer_peers is None or self.layer_peers.rank == 0)

    def fetch(self, value: np.ndarray) -> np.ndarray:
        """Returns the whole value on all of `peers`.

        Args:
          value: The whole value on a holder.
        """
        array = value if self.here else np.zeros(self.shape, value.dtype)
        return self.peers.agreement.broadcast([array], self.ranks[0])[0]


def held_by(variable: keras.Variable) -> Held | None:
    """Returns the location of a variable; None if every worker has it or a part of it."""
    return vars(variable).get(_ATTRIBUTE)


def mark_held(variable: keras.Variable, held: Held) -> None:
    """Records the location of a variable."""
    vars(variable)[_ATTRIBUTE] = held

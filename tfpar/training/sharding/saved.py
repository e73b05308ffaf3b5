"""The shares of all workers in a checkpoint, and the whole arrays that they make up.

The file of a worker holds the state of its pieces. A name consists of the index of the weight, followed by the part of
the model axis that the piece is of, if there is one; of the first element of the piece; and of the name that this state
has without shards. Any number of workers can read it, on any mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tfpar.checkpoint.names import state_without_counts
from tfpar.exchange.sharding.shards import joined
from tfpar.parallel.division import Split

import numpy as np

_PREFIX = "shard/"
WEIGHTS = "weights"  # the name of the owners' exact weights
SHARED = f"{_PREFIX}of"  # in the file of every worker of a sharded run, also of one that owns nothing


@dataclasses.dataclass(frozen=True)
class Part:
    """What a device has of a weight.

    Attributes:
      index: Index of the weight.
      split: The division of the weight over the model axis; None if every device has all of it.
      rank: Rank of the device on that axis.
    """

    index: int
    split: Split | None = None
    rank: int = 0

    @classmethod
    def named(cls, text: str) -> Part:
        """Returns the part with this `name`."""
        index, *numbers = map(int, text.split("."))
        if not numbers:
            return cls(index)
        axis, size, groups, padding, rank = numbers
        return cls(index, Split(axis, size, groups, padding), rank)

    @property
    def name(self) -> str:
        """The name of the part in a checkpoint, which says how the weight was divided."""
        if self.split is None:
            return str(self.index)
        split = self.split
        return ".".join(map(str, (self.index, split.axis, split.size, split.groups, split.padding, self.rank)))

    def key(self, begin: int, name: str) -> str:
        """The name of an array: of a piece from element `begin` of the part, whose whole weight has it as `name`."""
        return f"{_PREFIX}{self.name}/{begin}/{name}"

    def of(self, whole: np.ndarray, fill: float = 0.0) -> np.ndarray:
        """Takes this part of a whole array; its padding has the value `fill`."""
        return whole if self.split is None else self.split.filled(fill).part(whole, self.rank)


def whole_arrays(
    exports: Sequence[Mapping[str, np.ndarray]], shapes: Sequence[Sequence[int]]
) -> dict[tuple[str, int], np.ndarray]:
    """State of whole weights by name and index of the weight, assembled from the exports of all workers.

    The paths of weights, and so the names of their state, may repeat; indices do not. Of names that differ between
    workers in Keras' counts, the first counts.

    Args:
      exports: The export of each worker.
      shapes: Shapes of the weights.
    """
    pieces: dict[tuple[str, int], dict[Part, dict[int, np.ndarray]]] = {}
    first: dict[tuple[str, int], str] = {}
    for export in exports:
        for key, array in export.items():
            if is_share(key) and key != SHARED:
                text, begin, name = key.removeprefix(_PREFIX).split("/", 2)
                part = Part.named(text)
                name = first.setdefault((state_without_counts(name), part.index), name)
                pieces.setdefault((name, part.index), {}).setdefault(part, {})[int(begin)] = array
    return {(name, index): _whole(found, shapes[index]) for (name, index), found in pieces.items()}


def _whole(pieces: Mapping[Part, Mapping[int, np.ndarray]], shape: Sequence[int]) -> np.ndarray:
    parts = sorted(pieces, key=lambda part: part.rank)
    split = parts[0].split
    if split is None:
        return joined(pieces[parts[0]], shape)
    return split.joined([joined(pieces[part], split.part_shape(shape)) for part in parts])


def is_share(name: str) -> bool:
    """Whether an array of a worker's file belongs to its share of the optimizer state."""
    return name.startswith(_PREFIX)


def take_exact_weights(arrays: dict[tuple[str, int], np.ndarray]) -> dict[int, np.ndarray]:
    """Removes the owners' exact weights from the result of `whole_arrays`, and returns them by index."""
    return {index: arrays.pop((name, index)) for name, index in list(arrays) if name == WEIGHTS}

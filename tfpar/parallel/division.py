"""`Split` and `Shards`: how the parts of a variable make up its whole value.

Devices are numbered by the replica, and within it by the place on the model axis. Parts are numbered by rank; several
devices may have the same part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

_LITTLE = 65 / 64  # padding up to this factor is as good as none
# For each dimension that is divided, start and length of each range of the whole, in their order in the part.
Ranges = dict[int, tuple[tuple[int, int], ...]]


@dataclasses.dataclass(frozen=True)
class Split:
    """The division of a variable along one dimension, over the devices of the model axis.

    Attributes:
      axis: The dimension that is divided.
      size: Number of parts.
      groups: The dimension consists of this many blocks of equal length, each of which is divided separately: three, if
        one kernel computes query, key and value.
      padding: Number of elements by which the equal parts together exceed the whole, at the end of the dimension.
        Requires `groups` to be 1.
      fill: Value of the padding when a whole value is divided.
      copies: Number of adjacent devices that have the same part.
    """

    axis: int
    size: int
    groups: int = 1
    padding: int = 0
    fill: float = 0.0
    copies: ClassVar[int] = 1

    @classmethod
    def padded(cls, axis: int, size: int, length: int) -> Split:
        """Returns a split of a dimension of any length, with padding if necessary."""
        return cls(axis, size, padding=-length % size)

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether a shape can be divided into equal parts."""
        return (shape[self.axis] + self.padding) % (self.groups * self.size) == 0

    @property
    def devices(self) -> int:
        """Number of devices that have all parts between them, each of which may have copies."""
        return self.size

    @property
    def has_padding(self) -> bool:
        """Whether there is padding."""
        return self.padding > 0

    def rank_of(self, device: int) -> int:
        """Returns the rank of the part of a device."""
        return device % self.size

    def is_first(self, device: int) -> bool:
        """Whether a device is the first of those that have its part."""
        return device < self.size

    def filled(self, fill: float) -> Split:
        """Returns the same split with another value of the padding."""
        return dataclasses.replace(self, fill=fill)

    @property
    def in_order(self) -> bool:
        """Whether the parts, one after the other, are the elements of the whole value in order."""
        return self.axis == 0 and self.groups == 1

    def part(self, array: np.ndarray, rank: int) -> np.ndarray:
        """Returns the part of a rank."""
        padded = [*array.shape]
        padded[self.axis] += self.padding
        array = self.with_padding(array, padded)
        stretches = np.split(array, self.groups, axis=self.axis)
        return np.concatenate([np.split(each, self.size, axis=self.axis)[rank] for each in stretches], axis=self.axis)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the whole value, joined from all parts in order."""
        whole = np.empty(self.whole_shape(parts[0].shape), parts[0].dtype)
        for rank, part in enumerate(parts):
            self.place(whole, rank, part)
        return whole

    def place(self, whole: np.ndarray, rank: int, part: np.ndarray) -> None:
        """Writes the part of a rank into the whole value."""
        taken, before = 0, (slice(None),) * self.axis
        for start, length in self.stretches(whole.shape[self.axis], rank):
            whole[(*before, slice(start, start + length))] = part[(*before, slice(taken, taken + length))]
            taken += length

    def joined_tensor(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """`joined` for tensors."""
        stretches = [tf.split(part, self.groups, axis=self.axis) for part in parts]
        whole = tf.concat([part[group] for group in range(self.groups) for part in stretches], axis=self.axis)
        return whole[self._without_padding(whole.shape)] if self.padding else whole

    def part_tensors(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """Returns the parts of a tensor by rank: the inverse of `joined_tensor`."""
        if self.padding:
            paddings = [[0, self.padding * (axis == self.axis)] for axis in range(whole.shape.rank)]
            whole = tf.pad(whole, paddings, constant_values=self.fill)
        stretches = [tf.split(each, self.size, axis=self.axis) for each in tf.split(whole, self.groups, axis=self.axis)]
        return [tf.concat(parts, axis=self.axis) for parts in zip(*stretches, strict=True)]

    def stretches(self, length: int, rank: int) -> list[tuple[int, int]]:
        """Returns start and length of each range of the divided dimension that a part has, in order.

        Args:
          length: Length of that dimension in the whole value.
          rank: Rank of the part.
        """
        group, share = length // self.groups, (length + self.padding) // self.groups // self.size
        starts = [number * group + rank * share for number in range(self.groups)]
        return [(start, max(0, min(share, length - start))) for start in starts]

    def ranges(self, whole: Sequence[int], rank: int) -> Ranges:
        """Returns the `stretches` of the part of a value of this shape."""
        return {self.axis: tuple(self.stretches(whole[self.axis], rank))}

    def without_padding(self, part: np.ndarray, rank: int, whole: Sequence[int]) -> np.ndarray:
        """Returns the part of a rank of a value of this shape, without padding."""
        own = sum(length for _, length in self.stretches(whole[self.axis], rank))
        return part[(*[slice(None)] * self.axis, slice(own))]

    def with_padding(self, part: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Pads a part that was saved without padding to this shape."""
        return _padded(part, shape, self.fill)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole value from that of a part."""
        return (*part[: self.axis], part[self.axis] * self.size - self.padding, *part[self.axis + 1 :])

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a part from that of the whole value."""
        return (*whole[: self.axis], (whole[self.axis] + self.padding) // self.size, *whole[self.axis + 1 :])

    def _without_padding(self, padded: Sequence[int]) -> tuple[slice, ...]:
        return (*(slice(None) for _ in range(self.axis)), slice(padded[self.axis] - self.padding))


@dataclasses.dataclass(frozen=True)
class Shards:
    """The division of a variable among replicas; if a model axis divides it, too, of the part of each of its devices.

    Ranks count the parts of the first replica, then those of the second. It has the methods of `Split`.

    Attributes:
      shape: Shape of the whole value.
      split: The division among replicas.
      within: The division over the model axis, along another dimension; None if there is none.
      copies: Number of adjacent devices that have the same part.
    """

    shape: tuple[int, ...]
    split: Split
    within: Split | None = None
    copies: int = 1

    @classmethod
    def of(cls, shape: Sequence[int], replicas: int, devices: int = 1, within: Split | None = None) -> Shards:
        """Returns shards along the first dimension that needs little padding, other than the one divided already.

        Args:
          shape: Shape of the whole value, of two or more dimensions.
          replicas: Number of replicas.
          devices: Number of devices of a replica.
          within: See `Shards`.
        """

        def size(axis: int) -> float:
            return max(-(-shape[axis] // replicas) * replicas / max(shape[axis], 1), _LITTLE)

        axis = min((axis for axis in range(len(shape)) if within is None or axis != within.axis), key=size)
        split = Split.padded(axis, replicas, shape[axis])
        return cls(tuple(shape), split, within, 1 if within else devices)

    @property
    def padded_share(self) -> float:
        """The elements that replicas keep, padding included, in proportion to those that they divide."""
        length = self.gathered_shape[self.split.axis]
        return (length + self.split.padding) / max(length, 1)

    @property
    def size(self) -> int:
        """Number of parts."""
        return self.split.size * (self.within.size if self.within else 1)

    @property
    def devices(self) -> int:
        """See `Split.devices`."""
        return self.size * self.copies

    @property
    def has_padding(self) -> bool:
        """See `Split.has_padding`."""
        return self.split.has_padding or (self.within is not None and self.within.has_padding)

    @property
    def in_order(self) -> bool:
        """See `Split.in_order`."""
        return self.within is None and self.split.in_order

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """Shape of what a device has when it has gathered the shards of all replicas."""
        return self.within.part_shape(self.shape) if self.within else self.shape

    def rank_of(self, device: int) -> int:
        """See `Split.rank_of`."""
        return device // self.copies % self.size

    def is_first(self, device: int) -> bool:
        """See `Split.is_first`."""
        return device < self.devices and device % self.copies == 0

    def filled(self, fill: float) -> Shards:
        """See `Split.filled`."""
        within = self.within.filled(fill) if self.within else None
        return dataclasses.replace(self, split=self.split.filled(fill), within=within)

    def part(self, array: np.ndarray, rank: int) -> np.ndarray:
        """See `Split.part`."""
        replica, place = self._places(rank)
        return self.split.part(self.within.part(array, place) if self.within else array, replica)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """See `Split.joined`."""
        whole = np.empty(self.shape, parts[0].dtype)
        for rank, part in enumerate(parts):
            self.place(whole, rank, part)
        return whole

    def place(self, whole: np.ndarray, rank: int, part: np.ndarray) -> None:
        """See `Split.place`."""
        replica, place = self._places(rank)
        if self.within is None:
            self.split.place(whole, replica, part)
            return
        taken, before = 0, (slice(None),) * self.within.axis
        for start, length in self.within.stretches(self.shape[self.within.axis], place):
            stretch = whole[(*before, slice(start, start + length))]
            self.split.place(stretch, replica, part[(*before, slice(taken, taken + length))])
            taken += length

    def joined_tensor(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Split.joined_tensor`."""
        places = self.within.size if self.within else 1
        gathered = [self.split.joined_tensor(parts[place::places]) for place in range(places)]
        return self.within.joined_tensor(gathered) if self.within else gathered[0]

    def ranges(self, whole: Sequence[int], rank: int) -> Ranges:
        """See `Split.ranges`."""
        replica, place = self._places(rank)
        return self.split.ranges(whole, replica) | (self.within.ranges(whole, place) if self.within else {})

    def without_padding(self, part: np.ndarray, rank: int, whole: Sequence[int]) -> np.ndarray:
        """See `Split.without_padding`."""
        replica, place = self._places(rank)
        part = self.split.without_padding(part, replica, whole)
        return self.within.without_padding(part, place, whole) if self.within else part

    def with_padding(self, part: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """See `Split.with_padding`."""
        return _padded(part, shape, self.split.fill)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """See `Split.whole_shape`."""
        del part
        return self.shape

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """See `Split.part_shape`."""
        del whole
        return self.split.part_shape(self.gathered_shape)

    def _places(self, rank: int) -> tuple[int, int]:
        """Returns the number of the replica, and the place in it."""
        return divmod(rank, self.within.size if self.within else 1)


def _padded(part: np.ndarray, shape: Sequence[int], fill: float) -> np.ndarray:
    widths = [(0, length - own) for length, own in zip(shape, part.shape, strict=True)]
    return np.pad(part, widths, constant_values=fill) if any(width for _, width in widths) else part

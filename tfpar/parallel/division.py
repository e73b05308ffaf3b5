"""`Split` and `FlatSplit`: how the parts of a variable make up its whole value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Split:
    """The division of a variable.

    Attributes:
      axis: The dimension that is divided.
      size: Number of parts.
      groups: The dimension consists of this many blocks of equal length, each of which is divided separately: three, if
        one kernel computes query, key and value.
      padding: Number of elements by which the equal parts together exceed the whole, at the end of the dimension.
        Requires `groups` to be 1.
      fill: Value of the padding when a whole value is divided.
    """

    axis: int
    size: int
    groups: int = 1
    padding: int = 0
    fill: float = 0.0

    @classmethod
    def padded(cls, axis: int, size: int, length: int) -> Split:
        """Returns a split of a dimension of any length, with padding if necessary."""
        return cls(axis, size, padding=-length % size)

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether a shape can be divided into equal parts."""
        return (shape[self.axis] + self.padding) % (self.groups * self.size) == 0

    @property
    def in_order(self) -> bool:
        """Whether the parts, one after the other, are the elements of the whole value in order."""
        return self.axis == 0 and self.groups == 1

    def part(self, array: np.ndarray, rank: int) -> np.ndarray:
        """Returns the part of device `rank`."""
        array = self.with_padding(array, array.shape[self.axis] + self.padding)
        stretches = np.split(array, self.groups, axis=self.axis)
        return np.concatenate([np.split(each, self.size, axis=self.axis)[rank] for each in stretches], axis=self.axis)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the whole value, joined from the parts of all devices in order."""
        whole = np.empty(self.whole_shape(parts[0].shape), parts[0].dtype)
        for rank, part in enumerate(parts):
            self.place(whole, rank, part)
        return whole

    def place(self, whole: np.ndarray, rank: int, part: np.ndarray) -> None:
        """Writes the part of device `rank` into the whole value."""
        taken, before = 0, (slice(None),) * self.axis
        for start, length in self.stretches(whole.shape[self.axis], rank):
            whole[(*before, slice(start, start + length))] = part[(*before, slice(taken, taken + length))]
            taken += length

    def joined_tensor(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """`joined` for tensors."""
        stretches = [tf.split(part, self.groups, axis=self.axis) for part in parts]
        whole = tf.concat([part[group] for group in range(self.groups) for part in stretches], axis=self.axis)
        return whole[self._without_padding(whole.shape)] if self.padding else whole

    def stretches(self, length: int, rank: int) -> list[tuple[int, int]]:
        """Returns start and length of each range of the divided dimension that device `rank` has, in order.

        Args:
          length: Length of that dimension in the whole value.
          rank: Rank of the device.
        """
        group, share = length // self.groups, (length + self.padding) // self.groups // self.size
        starts = [number * group + rank * share for number in range(self.groups)]
        return [(start, max(0, min(share, length - start))) for start in starts]

    def without_padding(self, part: np.ndarray, rank: int, whole: Sequence[int]) -> np.ndarray:
        """Returns the part of device `rank` of a value of this shape, without padding."""
        own = sum(length for _, length in self.stretches(whole[self.axis], rank))
        return part[(*[slice(None)] * self.axis, slice(own))]

    def with_padding(self, part: np.ndarray, length: int) -> np.ndarray:
        """Pads a part that was saved without padding to this length of the divided dimension."""
        missing = length - part.shape[self.axis]
        widths = [(0, missing if axis == self.axis else 0) for axis in range(part.ndim)]
        return np.pad(part, widths, constant_values=self.fill) if missing else part

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole value from that of a part."""
        return (*part[: self.axis], part[self.axis] * self.size - self.padding, *part[self.axis + 1 :])

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a part from that of the whole value."""
        return (*whole[: self.axis], (whole[self.axis] + self.padding) // self.size, *whole[self.axis + 1 :])

    def _without_padding(self, padded: Sequence[int]) -> tuple[slice, ...]:
        return (*(slice(None) for _ in range(self.axis)), slice(padded[self.axis] - self.padding))


@dataclasses.dataclass(frozen=True)
class FlatSplit:
    """The division of a variable, flattened to a vector, into parts of equal length; padding repeats its last element.

    It has the methods of `Split`.

    Attributes:
      shape: Shape of the whole value.
      size: Number of parts.
      axis: None: no dimension is divided.
    """

    shape: tuple[int, ...]
    size: int
    axis = None

    @property
    def in_order(self) -> bool:
        """See `Split.in_order`."""
        return True

    @property
    def elements(self) -> int:
        """Number of elements of a part."""
        return -(-math.prod(self.shape) // self.size)

    def own_elements(self, rank: int) -> int:
        """Returns the number of elements of the part of device `rank`, without padding."""
        return min(max(math.prod(self.shape) - rank * self.elements, 0), self.elements)

    def stretches(self, length: int, rank: int) -> list[tuple[int, int]]:
        """See `Split.stretches`: of the flattened value, of this length. If the part is only padding, of the last
        element."""
        own = self.own_elements(rank)
        return [(rank * self.elements, own) if own else (length - 1, 1)]

    def with_padding(self, part: np.ndarray, length: int) -> np.ndarray:
        """See `Split.with_padding`: pads what is at `stretches`."""
        return np.pad(part, (0, length - part.size), mode="edge")

    def part(self, array: np.ndarray, rank: int) -> np.ndarray:
        """See `Split.part`."""
        flat = np.asarray(array).reshape(-1)
        return np.pad(flat, [0, self.size * self.elements - flat.size], mode="edge").reshape(self.size, -1)[rank]

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """See `Split.joined`."""
        return np.concatenate(parts)[: math.prod(self.shape)].reshape(self.shape)

    def place(self, whole: np.ndarray, rank: int, part: np.ndarray) -> None:
        """See `Split.place`."""
        start, length = rank * self.elements, self.own_elements(rank)
        whole.reshape(-1)[start : start + length] = part[:length]

    def part_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """See `Split.part_shape`."""
        del whole
        return (self.elements,)

    def without_padding(self, part: np.ndarray, rank: int, whole: Sequence[int]) -> np.ndarray:
        """See `Split.without_padding`."""
        del whole
        return part[: self.own_elements(rank)]

    def joined_tensor(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Split.joined_tensor`."""
        return tf.reshape(tf.concat(parts, axis=0)[: math.prod(self.shape)], self.shape)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole value."""
        del part
        return self.shape

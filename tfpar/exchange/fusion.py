"""Fusion of small tensors: which tensors share a buffer, and copies into buffers and out of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

# Tensors of this size are not fused: copies into a buffer and out of it would cost more than a call.
ALONE_BYTES = 4 << 20


def group_indices(
    indices: Sequence[int], sizes: Sequence[int], limit: int, alone: Collection[int] = ()
) -> list[list[int]]:
    """Groups consecutive tensors into buckets of at most `limit` bytes (one larger tensor is a bucket of its own).

    Args:
      indices: Which tensors.
      sizes: Elements of every tensor.
      limit: Bytes of float32 in a bucket.
      alone: Tensors that get their own buckets.
    """
    groups: list[list[int]] = [[]]
    filled = 0
    for index in indices:
        size = 4 * sizes[index]
        apart = index in alone or (bool(groups[-1]) and groups[-1][-1] in alone)
        if groups[-1] and (apart or filled + size > limit):
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += size
    return groups


class Fusion:
    """Which tensors share a buffer with each other, and with the sidecar.

    Args:
      shapes: Static shapes of all tensors.
      bucket_bytes: Tensors are fused up to this many bytes.
      without: Indices of tensors that are not fused.
      alone_bytes: Tensors of at least this many bytes are buffers of their own.

    Attributes:
      buffers: Number of buffers.
    """

    def __init__(
        self,
        shapes: Sequence[tf.TensorShape],
        bucket_bytes: int,
        without: Collection[int] = (),
        alone_bytes: int = ALONE_BYTES,
    ) -> None:
        self._shapes = list(shapes)
        self._sizes = [shape.num_elements() for shape in shapes]
        indices = [index for index in range(len(shapes)) if index not in without]
        small = [index for index in indices if 4 * self._sizes[index] < alone_bytes] or indices[:1]
        large = [index for index in indices if index not in small]
        # The sidecar is fused with the first layers, whose gradients are also complete last: a separate call would cost
        # a round trip.
        first, *others = group_indices(small, self._sizes, bucket_bytes)
        self._groups = [first, *sorted([*others, *([index] for index in large)])]
        self.buffers = len(self._groups)

    def fuse(self, gradients: Sequence[Any], sidecar: tf.Tensor) -> list[tf.Tensor]:
        """The buffers, each a vector; the first ends with the sidecar."""
        flat = [[tf.reshape(gradients[index], [-1]) for index in group] for group in self._groups]
        flat[0].append(sidecar)
        return [tf.concat(parts, axis=0) if len(parts) > 1 else parts[0] for parts in flat]

    def split(self, buffers: Sequence[tf.Tensor]) -> tuple[list[Any], tf.Tensor]:
        """Extracts tensors and sidecar from the buffers; None in place of tensors that are not fused."""
        gradients: list[Any] = [None] * len(self._shapes)
        first, sidecar = tf.split(buffers[0], [sum(self._sizes[index] for index in self._groups[0]), -1])
        for group, buffer in zip(self._groups, [first, *buffers[1:]], strict=True):
            sizes = [self._sizes[index] for index in group]
            for index, part in zip(group, tf.split(buffer, sizes) if sizes else [], strict=True):
                gradients[index] = tf.reshape(part, self._shapes[index])
        return gradients, sidecar

    def fused_bytes(self, sidecar_length: int) -> int:
        """Bytes of all buffers with a sidecar of `sidecar_length` scalars."""
        return 4 * (sum(self._sizes[index] for group in self._groups for index in group) + sidecar_length)

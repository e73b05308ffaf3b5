"""The exchange of `none`: dense sums of TensorFlow's all-reduce, and rows of embedding tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange.algorithms.sparse_rows import Rows
from tfpar.exchange.buckets import Wire
from tfpar.exchange.tuning import auto

import tensorflow as tf

# Tensors of this size travel as they are: copies into a bucket and out of it would cost more than a call.
_ALONE_BYTES = 4 << 20


class Rings:
    """Tensors, small ones fused into buckets, each of which one ring sums.

    Args:
      shapes: Static shapes of all tensors.
      group: All workers.
      bucket_bytes: Tensors are fused up to this size.
      sparse: Tensors of which rows are to travel where that is less, see `rows`.

    Attributes:
      rows: The tensors of which rows may travel.
    """

    def __init__(
        self, shapes: Sequence[tf.TensorShape], group: Group, bucket_bytes: int, sparse: Sequence[int] = ()
    ) -> None:
        self._shapes = list(shapes)
        self._sizes = [shape.num_elements() for shape in shapes]
        self._group = group
        self.rows = Rows({number: (shapes[number], self._ring(4 * self._sizes[number])) for number in sparse}, group)
        tables = self.rows.numbers
        others = [number for number in range(len(shapes)) if number not in tables]
        small = [number for number in others if 4 * self._sizes[number] < _ALONE_BYTES] or others[:1]
        large = [number for number in others if number not in small]
        # The sidecar rides with the first layers, whose gradients come last, as it does: a call of its own would cost
        # it a round trip.
        first, *fused = auto.fuse(small, self._sizes, bucket_bytes)
        self._buckets = [first, *sorted([*fused, *([number] for number in large)])]
        self._instances = allocate_instance_keys(len(self._buckets) + len(tables))

    def sum(self, gradients: Sequence[Any], sidecar: tf.Tensor) -> tuple[list[Any], tf.Tensor]:
        """Sums tensors and sidecar over the workers, several rings at a time: they fill a link better than one.

        Args:
          gradients: Float32; of `rows.numbers`, `rows.Slices`.
          sidecar: Float32 vector.
        """
        fused = self.fused(gradients, sidecar)
        instances = iter(self._instances[len(fused) :])
        # The last layers first, as the backward pass finishes them: on GPUs calls start in the order of the code.
        calls = reversed(list(zip(fused, self._instances, strict=False)))
        buffers = [self._group.all_reduce(buffer, instance) for buffer, instance in calls]
        result, sidecar = self.cut(buffers[::-1])
        if self.rows.numbers:
            tables = {number: gradients[number] for number in self.rows.numbers}
            dense = {number: functools.partial(self._group.all_reduce, instance=next(instances)) for number in tables}
            for number, rows in self.rows.sum(tables, dense).items():
                result[number] = rows
        return result, sidecar

    def fused(self, gradients: Sequence[Any], sidecar: tf.Tensor) -> list[tf.Tensor]:
        """What travels together, each bucket as a vector."""
        flat = [[tf.reshape(gradients[index], [-1]) for index in bucket] for bucket in self._buckets]
        flat[0].append(sidecar)
        return [tf.concat(parts, axis=0) if len(parts) > 1 else parts[0] for parts in flat]

    def cut(self, buffers: Sequence[tf.Tensor]) -> tuple[list[Any], tf.Tensor]:
        """Tensors and sidecar from what `fused` gave; None in the places of tables."""
        result: list[Any] = [None] * len(self._shapes)
        first, sidecar = tf.split(buffers[0], [sum(self._sizes[index] for index in self._buckets[0]), -1])
        for bucket, buffer in zip(self._buckets, [first, *buffers[1:]], strict=True):
            sizes = [self._sizes[index] for index in bucket]
            for index, part in zip(bucket, tf.split(buffer, sizes) if sizes else [], strict=True):
                result[index] = tf.reshape(part, self._shapes[index])
        return result, sidecar

    def payload_and_sent(self, sidecar_length: int) -> tuple[int, int]:
        """Bytes of this worker's gradients, and of what it sends, with a sidecar of so many scalars."""
        tables = self.rows.numbers
        fused = [size for number, size in enumerate(self._sizes) if number not in tables]
        ring, rows = self._ring(4 * (sum(fused) + sidecar_length)), self.rows.wire()
        return ring.payload + rows.payload, ring.sent + rows.sent

    def _ring(self, size: int) -> Wire:
        return Wire(size, 2 * (self._group.size - 1) * size // self._group.size)

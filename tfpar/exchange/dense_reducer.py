"""The exchange of `none` between workers: dense float32 sums by tfpar's own collective calls, and rows of
embeddings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange.algorithms.sparse_rows import SparseRows
from tfpar.exchange.buckets import WireBytes
from tfpar.exchange.fusion import ALONE_BYTES, Fusion
from tfpar.exchange.gradients import Gradient
from tfpar.exchange.reducer import Reducer, ShouldApply, Traffic, dense_traffic, reduce_per_worker

import tensorflow as tf


class DenseReducer(Reducer):
    """Tensors, small ones fused into buckets, each of which one ring sums.

    TensorFlow's strategy would put the buckets into one buffer again, and run a single ring (2.21: `bytes_per_pack`).
    Its all-reduce also fails inside a `tf.cond` (2.21: "You must feed a value for placeholder").

    Args:
      shapes: Static shapes of all tensors.
      group: All workers.
      device: Where the exchange runs.
      bucket_bytes: Tensors are fused up to this many bytes.
      sparse: Indices of the tensors whose rows are sent if that takes fewer bytes, see `sparse_rows`.
    """

    def __init__(
        self,
        shapes: Sequence[tf.TensorShape],
        group: Group,
        device: str,
        bucket_bytes: int,
        sparse: Sequence[int] = (),
    ) -> None:
        self._group = group
        self._device = device
        self._elements = sum(shape.num_elements() for shape in shapes)
        self._rows = SparseRows(
            {index: (shapes[index], self._ring(4 * shapes[index].num_elements())) for index in sparse}, group
        )
        # A transport that sums in chunks starts a call for less than a ring does: half a chunk is worth one.
        alone = group.capabilities.chunk_bytes // 2 or ALONE_BYTES
        self._fusion = Fusion(shapes, bucket_bytes, self._rows.indices, alone)
        self._instances = allocate_instance_keys(self._fusion.buffers + len(self._rows.indices), group)

    @property
    def sparse(self) -> list[int]:
        """Indices of the variables whose rows are sent."""
        return self._rows.indices

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums gradients and sidecar over all replicas; see `Reducer`."""
        del should_apply
        return reduce_per_worker(self._reduce, self._device, gradients, sidecar)

    def reduce_on_device(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums the tensors of one device over the workers. Called in a cross-replica context, on this device."""
        del should_apply
        return self._reduce(gradients, sidecar)

    def _reduce(self, gradients: Sequence[Gradient], sidecar: tf.Tensor) -> tuple[list[Gradient], tf.Tensor]:
        """Sums over the workers, several rings at a time: they fill a link better than one."""
        buffers = self._fusion.fuse(gradients, sidecar)
        # The last layers first, as the backward pass finishes them: on GPUs calls start in the order of the code.
        calls = reversed(list(zip(buffers, self._instances, strict=False)))
        reduced = [self._group.all_reduce(buffer, instance) for buffer, instance in calls]
        sums, sidecar = self._fusion.split(reduced[::-1])
        if self.sparse:
            keys = dict(zip(self.sparse, self._instances[len(buffers) :], strict=True))
            dense: dict[int, Any] = {
                index: functools.partial(self._group.all_reduce, instance=key) for index, key in keys.items()
            }
            for index, rows in self._rows.all_reduce({index: gradients[index] for index in keys}, dense).items():
                sums[index] = rows
        return sums, sidecar

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Bytes of a ring over all replicas or, for rows, the bytes that this worker sends."""
        if not self.sparse:
            return dense_traffic(self._elements, replicas, sidecar_length)
        ring, rows = self._ring(self._fusion.fused_bytes(sidecar_length)), self._rows.wire_bytes()
        all_dense = self._ring(4 * (self._elements + sidecar_length))
        return Traffic("none", "all_reduce, rows", ring.payload + rows.payload, ring.sent + rows.sent, all_dense.sent)

    def _ring(self, size: int) -> WireBytes:
        return WireBytes(size, 2 * (self._group.size - 1) * size // self._group.size)

"""A bucket whose blocks do not cross tensors, for formats whose scale is the mean of a block.

The error of such a format is as large as its scale, also for elements that are smaller. Where a small tensor shared a
block with one 10^4 times larger, its residual grew to 10^4 times its gradients, and float32 lost 10^-4 of them. The
errors of formats that scale by the largest element of a block are bounded by the element itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfpar.exchange.buckets import Bucket, Padding, PendingAssigns, WireBytes

import tensorflow as tf


class WholeBlocks:
    """Pads every tensor but the last to whole blocks, with copies of the elements of its last block.

    Copies, not zeros, which would reduce the mean of the block. A copy has the same residual as its original. Payloads
    grow by half a block for each tensor, on average.

    Args:
      make: Makes the bucket that exchanges padded tensors, from their shapes.
      shapes: Static shapes of the tensors.
      block: Elements of a block.
    """

    factor_rank = 0

    def __init__(
        self, make: Callable[[Sequence[tf.TensorShape]], Bucket], shapes: Sequence[tf.TensorShape], block: int
    ) -> None:
        self._shapes = list(shapes)
        self.padding = Padding(tuple(shape.num_elements() for shape in shapes), block)
        padded = [
            part
            for shape, pads in zip(shapes, self.padding.pads, strict=True)
            for part in (shape, *([tf.TensorShape([pads])] if pads else []))
        ]
        self._inner = make(padded)
        self.elements = sum(self.padding.sizes)
        self.shard_elements = self._inner.shard_elements
        self.state = self._inner.state

    def reduce(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers; see `buckets.Bucket`. The norms count copies too."""
        parts: list[tf.Tensor] = []
        own: list[int] = []
        for tensor, size, pads in zip(tensors, self.padding.sizes, self.padding.pads, strict=True):
            own.append(len(parts))
            parts.append(tensor)
            if pads:
                last = tf.reshape(tensor, [-1])[size - self.padding.tail(size) :]
                parts.append(tf.tile(last, [-(-pads // last.shape[0])])[:pads])
        sums, norms = self._inner.reduce(parts, step, pending)
        return [sums[index] for index in own], norms

    def wire_bytes(self) -> WireBytes:
        """Bytes per exchange and worker."""
        return self._inner.wire_bytes()

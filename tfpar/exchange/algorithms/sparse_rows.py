"""Gradients of embeddings: only the rows that a batch has touched. Functions run once per worker.

V rows of D elements in an embedding, N workers, n rows that a worker has, M rows that every worker sends.

A worker adds up its gradients by row. All workers gather how many rows each has, pad to the next of a few sizes, and
gather the rows of all with their indices; each adds up what it got in the order of the ranks, so that all have the same
bits. A worker sends `(N - 1) M (4 D + 4)` bytes. If that is not less than the bytes of the dense tensor, the embedding
is sent dense; the decision depends only on the counts of rows, which all workers have, so that all decide the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange.buckets import WireBytes
from tfpar.exchange.counting import ByteCounter

import numpy as np
import tensorflow as tf

# Values [n, ...] of a gradient and the indices [n] of their rows: tf.IndexedSlices as a structure of tensors.
RowGradient = tuple[tf.Tensor, tf.Tensor]

# TensorFlow's runtime fixes the shape of a collective by its instance key (2.21), so M takes a few fixed values, each
# with its own key: eight to every doubling, at most an eighth of padding.
_STEPS_PER_DOUBLING = 8
_FIRST_SIZE = 16
_COUNT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class _Embedding:
    """The fixed properties of an embedding.

    Attributes:
      shape: Static; [V, ...].
      column: Its place among all embeddings.
      sizes: The possible values of M, int32, ascending; the last is the largest that costs less than dense.
      instance: Instance key of the first size; those of the others follow.
      dense_payload: Bytes of the embedding if it is sent dense.
      dense_sent: Bytes that a worker then sends.
    """

    shape: tf.TensorShape
    column: int
    sizes: np.ndarray
    instance: int
    dense_payload: int
    dense_sent: int

    @property
    def rows(self) -> int:
        """Number of rows, V."""
        return self.shape[0]

    @property
    def elements(self) -> int:
        """Elements of a row, D."""
        return self.shape[1:].num_elements()


class SparseRows:
    """Embeddings whose rows are exchanged.

    Args:
      embeddings: Shape, and bytes if it travels dense, by the index of the variable.
      group: All workers.
      dtype: Dtype in which rows are sent, float32 or bfloat16.
      counter: Counts the bytes, beside those of other tensors, whose exchange it knows already; by default its own.
    """

    def __init__(
        self,
        embeddings: Mapping[int, tuple[tf.TensorShape, WireBytes]],
        group: Group,
        dtype: tf.DType = tf.float32,
        counter: ByteCounter | None = None,
    ) -> None:
        self._group = group
        self._half = dtype == tf.bfloat16
        self._embeddings: dict[int, _Embedding] = {}
        for index, (shape, wire) in embeddings.items():
            row_sent = (group.size - 1) * self._row_bytes(shape)
            fewest = wire.sent if wire.fewest is None else wire.fewest  # all workers must decide the same
            largest = min((fewest - 1) // row_sent if row_sent else 0, shape[0] - 1)
            if largest < 1:
                continue
            sizes = _sizes(largest)
            instance = allocate_instance_keys(len(sizes), group)[0]
            self._embeddings[index] = _Embedding(shape, len(self._embeddings), sizes, instance, wire.payload, wire.sent)
        if self._embeddings:
            self._instance = allocate_instance_keys(1, group)[0]
            self._counter = counter or ByteCounter("exchange_rows")
            self._counts_exchanges = counter is None

    @property
    def indices(self) -> list[int]:
        """The variables whose rows may be exchanged: those given for which a single row costs less than the dense
        tensor."""
        return list(self._embeddings)

    def all_reduce(
        self, gradients: Mapping[int, RowGradient], dense: Mapping[int, Callable[[tf.Tensor], tf.Tensor]]
    ) -> dict[int, RowGradient]:
        """Sums the gradients of all embeddings over the workers.

        Args:
          gradients: This worker's gradient of every embedding, no row twice; float32 and int64.
          dense: For every embedding, how its gradient [V, ...] is summed as a dense tensor.

        Returns:
          The sums, no row twice, the same bits on every worker.
        """
        counts = tf.concat([tf.shape(gradients[index][1]) for index in self._embeddings], axis=0)
        counts = self._group.all_gather(counts[tf.newaxis], self._instance)
        told = _COUNT_BYTES * len(self._embeddings)
        self._counter.add(told, told * (self._group.size - 1), exchanges=int(self._counts_exchanges))
        return {
            index: self._reduce_one(embedding, gradients[index], counts[:, embedding.column], dense[index])
            for index, embedding in self._embeddings.items()
        }

    def _reduce_one(
        self, embedding: _Embedding, gradient: RowGradient, counts: tf.Tensor, dense: Callable[[tf.Tensor], tf.Tensor]
    ) -> RowGradient:
        largest = tf.reduce_max(counts)

        def as_rows() -> RowGradient:
            step = tf.searchsorted(embedding.sizes, largest[tf.newaxis])[0]
            size = tf.gather(embedding.sizes, step)
            payload = tf.cast(size, tf.int64) * self._row_bytes(embedding.shape)
            self._counter.add(payload, payload * (self._group.size - 1))
            return self._reduce_rows(embedding, gradient, counts, size, embedding.instance + step)

        def as_tensor() -> RowGradient:
            self._counter.add(embedding.dense_payload, embedding.dense_sent)
            return dense(densified(gradient, embedding.shape)), tf.range(embedding.rows, dtype=tf.int64)

        return tf.cond(largest <= int(embedding.sizes[-1]), as_rows, as_tensor)

    def _reduce_rows(
        self, embedding: _Embedding, gradient: RowGradient, counts: tf.Tensor, size: tf.Tensor, instance: tf.Tensor
    ) -> RowGradient:
        words = self._packed(gradient, embedding.elements)
        padded = tf.pad(words, [[0, size - tf.shape(words)[0]], [0, 0]])
        gathered = self._group.all_gather(padded[tf.newaxis], instance)
        of_rank = [gathered[rank, : counts[rank]] for rank in range(self._group.size)]
        indices, places = tf.unique(tf.concat([words[:, -1] for words in of_rank], axis=0))
        total = tf.zeros([tf.shape(indices)[0], embedding.elements])
        # One rank at a time, within which no row is repeated: the order of additions is fixed even if they run in
        # parallel.
        for words, place in zip(of_rank, tf.split(places, counts, num=self._group.size), strict=True):
            total = tf.tensor_scatter_nd_add(total, place[:, tf.newaxis], self._unpacked(words, embedding.elements))
        return tf.reshape(total, [-1, *embedding.shape[1:]]), tf.cast(indices, tf.int64)

    def _row_bytes(self, shape: tf.TensorShape) -> int:
        """Bytes of one row and its index."""
        elements = shape[1:].num_elements()
        return 4 * ((elements + 1) // 2 + 1) if self._half else 4 * (elements + 1)

    def _packed(self, gradient: RowGradient, elements: int) -> tf.Tensor:
        """Rows and, last, their indices as words: int32 [n, words]. Collectives take no bfloat16 beside integers."""
        values = tf.reshape(gradient[0], [-1, elements])
        if self._half:
            halves = tf.cast(tf.pad(values, [[0, 0], [0, elements % 2]]), tf.bfloat16)
            values = tf.reshape(halves, [-1, -(-elements // 2), 2])
        return tf.concat([tf.bitcast(values, tf.int32), tf.cast(gradient[1], tf.int32)[:, tf.newaxis]], axis=1)

    def _unpacked(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        """Rows from words, float32 [n, D]."""
        if not self._half:
            return tf.bitcast(words[:, :-1], tf.float32)
        pairs = tf.cast(tf.bitcast(words[:, :-1], tf.bfloat16), tf.float32)
        return tf.reshape(pairs, [-1, elements + elements % 2])[:, :elements]

    def wire_bytes(self) -> WireBytes:
        """Bytes per exchange and worker: the mean of those so far; before the first, those of dense tensors."""
        embeddings = self._embeddings.values()
        before = WireBytes(sum(one.dense_payload for one in embeddings), sum(one.dense_sent for one in embeddings))
        return (self._counter.mean() if embeddings else None) or before


def summed_by_row(values: tf.Tensor, indices: tf.Tensor) -> RowGradient:
    """Adds up the values that belong to the same row.

    Args:
      values: Values of any float type, [n, ...].
      indices: Integers [n].

    Returns:
      Float32 [m, ...] and int64 [m], no index twice.
    """
    unique, places = tf.unique(tf.cast(indices, tf.int64))
    return tf.math.unsorted_segment_sum(tf.cast(values, tf.float32), places, tf.shape(unique)[0]), unique


def densified(gradient: RowGradient, shape: tf.TensorShape) -> tf.Tensor:
    """The dense tensor of this shape with these rows, none of them twice, and zeros elsewhere."""
    values, indices = gradient
    return tf.ensure_shape(tf.scatter_nd(indices[:, tf.newaxis], values, tf.constant(shape.as_list(), tf.int64)), shape)


def _sizes(largest: int) -> np.ndarray:
    """Counts of rows to pad to, up to the largest."""
    sizes = []
    size = _FIRST_SIZE
    while size < largest:
        sizes.append(size)
        size += max(1, (1 << (size.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return np.array([*sizes, largest], np.int32)

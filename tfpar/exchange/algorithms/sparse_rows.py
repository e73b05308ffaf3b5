"""Gradients of embedding tables: the rows that a batch has touched, not the table. Functions run once per worker.

V rows of D elements in a table, N workers, n rows that a worker has, M rows that every worker sends.

A worker adds up its gradients by row. All tell how many rows they have, pad to the next of a few sizes, and gather the
rows of all and their numbers; each adds up what it got in the order of the ranks, so that all have the same bits. A
worker sends `(N - 1) M (4 D + 4)` bytes. Where that is not less than what the table costs as any other tensor, it
travels as one: the numbers of rows decide, which all know, so that all decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import local_copy
from tfpar.exchange import buckets

import numpy as np
import tensorflow as tf

# Values [n, ...] of a gradient and the numbers [n] of their rows: tf.IndexedSlices as a structure of tensors.
Slices = tuple[tf.Tensor, tf.Tensor]

# TensorFlow's runtime remembers the shape of a collective by its instance key (2.21), so M comes in steps, each with a
# key of its own: eight to every doubling, at most an eighth of padding.
_STEPS_PER_DOUBLING = 8
_FIRST_SIZE = 16
_COUNT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class _Table:
    """What is fixed of a table.

    Attributes:
      shape: Static; [V, ...].
      column: Its place among all tables.
      sizes: What M may be, int32, ascending; the last is the largest that is less than dense.
      instance: Key of the first of them; the others follow.
      dense_payload: Bytes of the table where it travels as any other tensor.
      dense_sent: Bytes that a worker sends then.
    """

    shape: tf.TensorShape
    column: int
    sizes: np.ndarray
    instance: int
    dense_payload: int
    dense_sent: int

    @property
    def rows(self) -> int:
        """V."""
        return self.shape[0]

    @property
    def elements(self) -> int:
        """D."""
        return self.shape[1:].num_elements()


class Rows:
    """Tables of which rows travel.

    Args:
      tables: Shape, and bytes of payload and sent by a worker if it travels dense, by the number of the variable.
      group: All workers.
      half: Whether rows travel as bfloat16, not float32.

    Attributes:
      numbers: Variables whose rows may travel: of those given, the ones where a single row is less than the table.
    """

    def __init__(
        self, tables: Mapping[int, tuple[tf.TensorShape, buckets.Wire]], group: Group, *, half: bool = False
    ) -> None:
        self._group = group
        self._half = half
        self._tables: dict[int, _Table] = {}
        for number, (shape, wire) in tables.items():
            row_sent = (group.size - 1) * self._row_bytes(shape)
            largest = min((wire.sent - 1) // row_sent if row_sent else 0, shape[0] - 1)
            if largest < 1:
                continue
            sizes = _sizes(largest)
            instance = allocate_instance_keys(len(sizes))[0]
            self._tables[number] = _Table(shape, len(self._tables), sizes, instance, wire.payload, wire.sent)
        if self._tables:
            self._instance = allocate_instance_keys(1)[0]
            # Bytes of all exchanges so far, payload and sent, and their number.
            self._total = buckets.counter_variable(3, "exchange_rows")

    @property
    def numbers(self) -> list[int]:
        """See the class."""
        return list(self._tables)

    def sum(
        self, gradients: Mapping[int, Slices], dense: Mapping[int, Callable[[tf.Tensor], tf.Tensor]]
    ) -> dict[int, Slices]:
        """Sums tables over the workers.

        Args:
          gradients: This worker's, of every table, no row twice; float32 and int64.
          dense: For every table, how its gradient [V, ...] is summed as any other tensor.

        Returns:
          The sums, no row twice, the same bits on every worker.
        """
        counts = tf.concat([tf.shape(gradients[number][1]) for number in self._tables], axis=0)
        counts = self._group.all_gather(counts[tf.newaxis], self._instance)
        self._note(_COUNT_BYTES * len(self._tables), _COUNT_BYTES * len(self._tables) * (self._group.size - 1), 1)
        return {
            number: self._sum(table, gradients[number], counts[:, table.column], dense[number])
            for number, table in self._tables.items()
        }

    def _sum(
        self, table: _Table, gradient: Slices, counts: tf.Tensor, dense: Callable[[tf.Tensor], tf.Tensor]
    ) -> Slices:
        largest = tf.reduce_max(counts)

        def as_rows() -> Slices:
            step = tf.searchsorted(table.sizes, largest[tf.newaxis])[0]
            size = tf.gather(table.sizes, step)
            payload = tf.cast(size, tf.int64) * self._row_bytes(table.shape)
            self._note(payload, payload * (self._group.size - 1), 0)
            return self._sum_rows(table, gradient, counts, size, table.instance + step)

        def as_tensor() -> Slices:
            self._note(table.dense_payload, table.dense_sent, 0)
            return dense(densified(gradient, table.shape)), tf.range(table.rows, dtype=tf.int64)

        return tf.cond(largest <= int(table.sizes[-1]), as_rows, as_tensor)

    def _sum_rows(
        self, table: _Table, gradient: Slices, counts: tf.Tensor, size: tf.Tensor, instance: tf.Tensor
    ) -> Slices:
        words = self._packed(gradient, table.elements)
        padded = tf.pad(words, [[0, size - tf.shape(words)[0]], [0, 0]])
        gathered = self._group.all_gather(padded[tf.newaxis], instance)
        of_rank = [gathered[rank, : counts[rank]] for rank in range(self._group.size)]
        numbers, places = tf.unique(tf.concat([words[:, -1] for words in of_rank], axis=0))
        total = tf.zeros([tf.shape(numbers)[0], table.elements])
        # A rank at a time, in which no row comes twice: the order of additions is fixed, also where they run at once.
        for words, place in zip(of_rank, tf.split(places, counts, num=self._group.size), strict=True):
            total = tf.tensor_scatter_nd_add(total, place[:, tf.newaxis], self._unpacked(words, table.elements))
        return tf.reshape(total, [-1, *table.shape[1:]]), tf.cast(numbers, tf.int64)

    def _row_bytes(self, shape: tf.TensorShape) -> int:
        """Bytes of one row and its number."""
        elements = shape[1:].num_elements()
        return 4 * ((elements + 1) // 2 + 1) if self._half else 4 * (elements + 1)

    def _packed(self, gradient: Slices, elements: int) -> tf.Tensor:
        """Rows and, last, their numbers as words: int32 [n, words]. Collectives take no bfloat16 beside integers."""
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

    def _note(self, payload: tf.Tensor | int, sent: tf.Tensor | int, exchanges: int) -> None:
        values = [tf.cast(value, tf.int64) for value in (payload, sent, exchanges)]
        local_copy(self._total).assign_add(tf.stack(values), read_value=False)

    def wire(self) -> buckets.Wire:
        """Bytes per exchange and worker: the mean of those so far; before the first, those of dense tables."""
        payload, sent, exchanges = local_copy(self._total).numpy().tolist() if self._tables else (0, 0, 0)
        if not exchanges:
            tables = self._tables.values()
            return buckets.Wire(sum(one.dense_payload for one in tables), sum(one.dense_sent for one in tables))
        return buckets.Wire(round(payload / exchanges), round(sent / exchanges))


def summed_by_row(values: tf.Tensor, numbers: tf.Tensor) -> Slices:
    """Adds up what belongs to the same row.

    Args:
      values: Of any float type, [n, ...].
      numbers: Integers [n].

    Returns:
      Float32 [m, ...] and int64 [m], no number twice.
    """
    unique, places = tf.unique(tf.cast(numbers, tf.int64))
    return tf.math.unsorted_segment_sum(tf.cast(values, tf.float32), places, tf.shape(unique)[0]), unique


def densified(gradient: Slices, shape: tf.TensorShape) -> tf.Tensor:
    """The tensor that rows, none of them twice, are of."""
    values, numbers = gradient
    return tf.ensure_shape(tf.scatter_nd(numbers[:, tf.newaxis], values, tf.constant(shape.as_list(), tf.int64)), shape)


def _sizes(largest: int) -> np.ndarray:
    """Numbers of rows to pad to, up to the largest."""
    sizes = []
    size = _FIRST_SIZE
    while size < largest:
        sizes.append(size)
        size += max(1, (1 << (size.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return np.array([*sizes, largest], np.int32)

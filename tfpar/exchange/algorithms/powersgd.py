"""PowerSGD: gradient matrices exchanged as two thin factors (Vogels, Karimireddy and Jaggi 2019).

Functions run once per worker, on its first device.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange import buckets
from tfpar.exchange.buckets import Changes, Wire
from tfpar.exchange.spec import Spec

import tensorflow as tf


def matrix_shape(shape: tf.TensorShape) -> tuple[int, int]:
    """A tensor as a matrix: its last dim, which Keras has for outputs, against all others."""
    columns = int(shape[-1])
    return shape.num_elements() // columns, columns


def worthwhile(shape: tf.TensorShape, rank: int) -> bool:
    """Whether the factors of a tensor have fewer elements than it has itself."""
    if len(shape) < 2:
        return False
    rows, columns = matrix_shape(shape)
    return rank * (rows + columns) < rows * columns


class PowerSGD:
    """Matrices M that are exchanged as P Q^T of rank r: one step of subspace iteration, warm-started, per exchange.

    With M_w the gradient of worker w plus its residual: P = sum of M_w Q, orthonormalised; Q' = sum of M_w^T P; the sum
    of the M_w is taken to be P Q'^T, and worker w keeps M_w - P Q'^T / W. Being linear, it needs two all-reduces of
    thin float32 matrices, and no all-gather. Every worker multiplies the same factors: the result has the same bits on
    workers with the same processor and libraries.

    Args:
      spec: The exchange; it has a rank.
      shapes: Static shapes of the tensors, each `worthwhile`.
      group: All workers.
      seed: Seed of the first Q, the same on all workers.
      name: Of the variables.
    """

    def __init__(self, spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str) -> None:
        self.shapes = list(shapes)
        self.elements = self.shard_elements = sum(shape.num_elements() for shape in shapes)
        self._group = group
        self._matrices = [matrix_shape(shape) for shape in shapes]
        self._rank = spec.rank
        self._rows = [rows * self._rank for rows, _ in self._matrices]
        self._columns = [columns * self._rank for _, columns in self._matrices]
        self._instances = allocate_instance_keys(2)
        first = tf.random.stateless_normal([sum(self._columns)], [seed, 0x5067])
        self.state = {"factors": buckets.worker_variable([sum(self._columns)], f"{name}_factors", first)}
        if spec.error_feedback:
            self.state["worker"] = buckets.worker_variable([self.elements], f"{name}_worker")

    def sum(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, changes: Changes | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """See `buckets.Bucket`."""
        del step
        norm = tf.add_n([2.0 * tf.nn.l2_loss(tensor) for tensor in tensors])
        matrices = [tf.reshape(tensor, shape) for tensor, shape in zip(tensors, self._matrices, strict=True)]
        if "worker" in self.state:
            kept = tf.split(self.state["worker"].read_value(), [rows * columns for rows, columns in self._matrices])
            matrices = [matrix + tf.reshape(part, matrix.shape) for matrix, part in zip(matrices, kept, strict=True)]
        right = self._cut(self.state["factors"].read_value(), self._columns)
        first, second = self._instances
        products = [tf.matmul(matrix, factor) for matrix, factor in zip(matrices, right, strict=True)]
        left = [tf.linalg.qr(product).q for product in self._all_reduce(products, self._rows, first)]
        products = [tf.matmul(matrix, factor, transpose_a=True) for matrix, factor in zip(matrices, left, strict=True)]
        right = self._all_reduce(products, self._columns, second)
        sums = [tf.matmul(one, other, transpose_b=True) for one, other in zip(left, right, strict=True)]
        # Only its directions matter for the next step; the mean keeps it from growing.
        buckets.change(self.state["factors"], _flat(right) / self._group.size, changes)
        residual_norm = tf.zeros([])
        if "worker" in self.state:
            rest = [matrix - total / self._group.size for matrix, total in zip(matrices, sums, strict=True)]
            residual_norm = tf.add_n([2.0 * tf.nn.l2_loss(part) for part in rest])
            buckets.change(self.state["worker"], _flat(rest), changes)
        result = [tf.reshape(total, shape) for total, shape in zip(sums, self.shapes, strict=True)]
        return result, tf.stack([norm, residual_norm])

    def wire(self) -> Wire:
        """Bytes per exchange and worker: two all-reduces, each of which sends 2 (W - 1) / W of what it sums."""
        payload = 4 * (sum(self._rows) + sum(self._columns))
        return Wire(payload, 2 * (self._group.size - 1) * payload // self._group.size)

    def _all_reduce(self, parts: Sequence[tf.Tensor], sizes: Sequence[int], instance: int) -> list[tf.Tensor]:
        return self._cut(self._group.all_reduce(_flat(parts), instance), sizes)

    def _cut(self, vector: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
        return [tf.reshape(part, [-1, self._rank]) for part in tf.split(vector, sizes)]


def _flat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)

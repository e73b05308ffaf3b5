"""PowerSGD: gradient matrices exchanged as two thin factors (Vogels, Karimireddy and Jaggi 2019).

Functions run once per worker, on its first device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.collectives import cost_model
from tfpar.collectives.cost_model import Cost, Link, Speed
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange import buckets
from tfpar.exchange.buckets import PendingAssigns, WireBytes
from tfpar.exchange.options import Options, option, whole
from tfpar.exchange.registry import register

import tensorflow as tf

_EXPONENT = 0x7F800000  # the bits of a float32's exponent
_LARGEST = 2.0**112  # products of two factors of the largest rank, 1024, are finite


def matrix_shape(shape: tf.TensorShape) -> tuple[int, int]:
    """A tensor as a matrix: all dims but the last as rows; the last, Keras' dim of outputs, as columns."""
    columns = int(shape[-1])
    return shape.num_elements() // columns, columns


def scaled(matrix: tf.Tensor) -> tf.Tensor:
    """A float32 matrix, divided by a power of two so that its largest magnitude is from 1 to 2.

    TensorFlow's QR decomposition adds up squares, which overflow from 2e19 on and vanish below 1e-19.
    """
    largest = tf.bitcast(tf.reduce_max(tf.abs(matrix)), tf.int32)
    power = tf.bitcast(tf.bitwise.bitwise_and(largest, _EXPONENT), tf.float32)
    return matrix / tf.where(power > 0.0, power, 1.0)


def _are_usable(sums: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether the products of sums of all workers are finite, so that the next exchange may start from them."""
    return tf.reduce_all([tf.reduce_all(tf.abs(part) < _LARGEST) for part in sums])


def _read_rank(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError(f"{text!r} is not a rank from 1 to 1024, as in powersgd:4.")
    return int(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGDOptions(Options):
    """Options of `powersgd`.

    Attributes:
      rank: Columns of the factors.
      warmup_steps: Exchanges at the start in which gradients are sent dense; the paper's code and PyTorch call it
        `start_after`.
    """

    rank: int = option(4, "Columns of the factors, 1 to 1024.", read=_read_rank)
    warmup_steps: int = whole(0, "Steps at the start in which gradients are sent dense.", alias="start_after")

    def is_compressible(self, shape: tf.TensorShape) -> bool:
        """Whether a tensor is large enough, and its factors have fewer elements than the tensor."""
        if not super().is_compressible(shape):
            return False
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + columns) < rows * columns

    @property
    def description(self) -> str:
        """How payloads move between workers, in a few words."""
        return "all_reduce of factors"


class PowerSGD:
    """Matrices M that are exchanged as P Q^T of rank r: one step of subspace iteration, warm-started, per exchange.

    With M_w the gradient of worker w plus its residual: P = sum of M_w Q, orthonormalised; Q' = sum of M_w^T P; the sum
    of the M_w is taken to be P Q'^T, and worker w keeps M_w - P Q'^T / W. Being linear, it needs two all-reduces of
    thin float32 matrices, and no all-gather. Every worker multiplies the same factors: the result has the same bits on
    workers with the same processor and libraries. Q and P are scaled by powers of two before they are multiplied and
    orthonormalised, neither of which overflows then, however large M is; it changes no other bits.

    Args:
      options: The options.
      shapes: Static shapes of the tensors, each compressible.
      group: All workers.
      seed: Seed of the first Q, the same on all workers.
      name: Prefix of the variables' names.
    """

    def __init__(
        self, options: PowerSGDOptions, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str
    ) -> None:
        self.shapes = list(shapes)
        self.elements = self.shard_elements = sum(shape.num_elements() for shape in shapes)
        self._group = group
        self._matrices = [matrix_shape(shape) for shape in shapes]
        self.factor_rank = options.rank
        self._rows = [rows * self.factor_rank for rows, _ in self._matrices]
        self._columns = [columns * self.factor_rank for _, columns in self._matrices]
        self._instances = allocate_instance_keys(2, group)
        first = tf.random.stateless_normal([sum(self._columns)], [seed, 0x5067])
        self.state = {"factors": buckets.worker_variable([sum(self._columns)], f"{name}_factors", first)}
        self.state |= buckets.residual_variables({"worker": self.elements}, name, error_feedback=options.error_feedback)

    def reduce(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers; see `buckets.Bucket`."""
        del step
        norm = tf.add_n([2.0 * tf.nn.l2_loss(tensor) for tensor in tensors])
        matrices = [tf.reshape(tensor, shape) for tensor, shape in zip(tensors, self._matrices, strict=True)]
        if "worker" in self.state:
            residuals = tf.split(
                self.state["worker"].read_value(), [rows * columns for rows, columns in self._matrices]
            )
            matrices = [
                matrix + tf.reshape(part, matrix.shape) for matrix, part in zip(matrices, residuals, strict=True)
            ]
        before = self._cut(self.state["factors"].read_value(), self._columns)
        first, second = self._instances
        products = [tf.matmul(matrix, scaled(factor)) for matrix, factor in zip(matrices, before, strict=True)]
        directions = self._all_reduce(products, self._rows, first)
        left = [tf.linalg.qr(scaled(direction)).q for direction in directions]
        products = [tf.matmul(matrix, factor, transpose_a=True) for matrix, factor in zip(matrices, left, strict=True)]
        right = self._all_reduce(products, self._columns, second)
        sums = [tf.matmul(one, other, transpose_b=True) for one, other in zip(left, right, strict=True)]
        # Only its directions matter for the next step; the mean keeps it from growing. A column of zeros, as where the
        # gradient is zero, would stay zero for good, unless the first rows of later matrices are not.
        usable = _are_usable([*directions, *right])
        after = [
            tf.where(usable & tf.reduce_any(new != 0.0, axis=0), new / self._group.size, old)
            for new, old in zip(right, before, strict=True)
        ]
        buckets.assign_or_defer(self.state["factors"], buckets.concatenated(after), pending)
        residual_norm = tf.zeros([])
        if "worker" in self.state:
            rest = [matrix - total / self._group.size for matrix, total in zip(matrices, sums, strict=True)]
            residual_norm = tf.add_n([2.0 * tf.nn.l2_loss(part) for part in rest])
            kept = tf.cond(usable, lambda: buckets.concatenated(rest), self.state["worker"].read_value)
            buckets.assign_or_defer(self.state["worker"], kept, pending)
        result = [tf.reshape(total, shape) for total, shape in zip(sums, self.shapes, strict=True)]
        return result, tf.stack([norm, residual_norm])

    def wire_bytes(self) -> WireBytes:
        """Bytes per exchange and worker: two all-reduces, each of which sends 2 (W - 1) / W of what it sums."""
        payload = 4 * (sum(self._rows) + sum(self._columns))
        return WireBytes(payload, 2 * (self._group.size - 1) * payload // self._group.size)

    def _all_reduce(self, parts: Sequence[tf.Tensor], sizes: Sequence[int], instance: int) -> list[tf.Tensor]:
        return self._cut(self._group.all_reduce(buckets.concatenated(parts), instance), sizes)

    def _cut(self, vector: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
        return [tf.reshape(part, [-1, self.factor_rank]) for part in tf.split(vector, sizes)]


def cost(options: PowerSGDOptions, elements: int, workers: int, link: Link, speed: Speed) -> Cost:
    """The cost of exchanging a vector as one square matrix, see `registry.register`."""
    side = max(1, round(elements**0.5))
    ring = cost_model.all_reduce(2 * 4 * side * options.rank, workers, link)
    # Each of three products and the residual reads the matrix once; two all-reduces wait twice.
    return dataclasses.replace(ring, latency=2 * ring.latency, compute=speed.encoding(4 * 4 * elements))


register(
    "powersgd",
    PowerSGDOptions,
    PowerSGD,
    cost=cost,
    summary="matrices as two thin factors (Vogels et al. 2019)",
    example="start_after=100",
)

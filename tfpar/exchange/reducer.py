"""Reducers: the protocol behind `Exchange`, and the reducers that need no collectives of tfpar's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tfpar.exchange.algorithms.sparse_rows import summed_by_row
from tfpar.exchange.fusion import Fusion
from tfpar.exchange.gradients import Gradient
from tfpar.exchange.residual_units import ResidualUnits

import numpy as np
import tensorflow as tf

# Bool scalar from the summed sidecar: whether the step will be applied.
ShouldApply = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one exchange.

    Attributes:
      codec: Name of the codec.
      pattern: Name of the pattern.
      payload_bytes: Encoded gradient and sidecar of one replica, bytes.
      wire_bytes: Bytes each replica sends, by the formula of the pattern: `2 (N-1)/N x payload` for a ring. With a
        codec, bytes that each worker sends.
      dense_bytes: The value of `wire_bytes` with `none`.
      model_axis_bytes: Bytes that a device sends to the others of its replica, within layers that are divided.
    """

    codec: str
    pattern: str
    payload_bytes: int
    wire_bytes: int
    dense_bytes: int
    model_axis_bytes: int = 0

    def with_sum(self, elements: int, replicas: int) -> Traffic:
        """The bytes of this exchange, and of a sum over all replicas of so many float32 elements, sent dense."""
        further = dense_traffic(elements, replicas, 0)
        return dataclasses.replace(
            self,
            payload_bytes=self.payload_bytes + further.payload_bytes,
            wire_bytes=self.wire_bytes + further.wire_bytes,
            dense_bytes=self.dense_bytes + further.dense_bytes,
        )


@dataclasses.dataclass(frozen=True)
class GatheredWeights:
    """Sharded weights that replicas gather within a step, in addition to the exchange (`--shard=weights`).

    Attributes:
      elements: Number of elements of all trained weights, float32, padding included.
      micro_batches: Number of micro-batches of a step. In each, weights are gathered twice and gradients scattered
        once.
      frozen: Number of elements of all frozen weights, which have no gradients.
      sent: Bytes that each worker sends in a step for this; 0 until the step is traced, when the attributes above
        estimate it. Of tables, replicas may exchange only the rows that they look up.
    """

    elements: int = 0
    micro_batches: int = 1
    frozen: int = 0
    sent: int = 0

    def added(self, traffic: Traffic, replicas: int) -> Traffic:
        """The bytes of one exchange, with these added."""
        if not self.elements and not self.frozen:
            return traffic
        whole = 4 * self.elements
        payload = self.micro_batches * (3 * whole + 2 * 4 * self.frozen)
        if self.sent:
            payload = self.sent * replicas // (replicas - 1)
        return Traffic(
            traffic.codec,
            "gathered weights",
            traffic.payload_bytes + payload,
            traffic.wire_bytes + (self.sent or (replicas - 1) * payload // replicas),
            traffic.dense_bytes + 2 * (replicas - 1) * whole // replicas,
        )


class Reducer(Protocol):
    """Sums gradients and sidecar over all replicas.

    The default values here are those of a reducer without state that sends gradients dense.

    Attributes:
      sparse: Indices of the variables whose gradients come and return as `RowGradient`.
      state: This worker's variables that an exchange changes.
      compresses: Whether gradients are encoded.
      first_ready_indices: Indices of the variables whose gradients are sent first, if buckets are sent while other
        gradients are being computed; otherwise empty.
      plan_table: The measurements and choices of `auto`, as text; empty for any other exchange.
      units: The units of its residuals.
    """

    @property
    def sparse(self) -> list[int]:
        return []

    @property
    def state(self) -> list[tf.Variable]:
        return []

    @property
    def compresses(self) -> bool:
        return False

    @property
    def first_ready_indices(self) -> list[int]:
        return []

    @property
    def plan_table(self) -> str:
        return ""

    units: Sequence[ResidualUnits] = ()

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums gradients and sidecar. Called in a replica context.

        Args:
          gradients: This replica's gradients, float32; of the variables in `sparse`, rows none of which comes twice.
          sidecar: Float32 vector, summed exactly.
          should_apply: Returns from the summed sidecar whether the step will be applied. If not, the state does not
            change, and the sums are meaningless.

        Returns:
          The sums of both, the same bits on every replica.
        """

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Bytes of one exchange over `replicas` replicas with a sidecar of `sidecar_length` scalars."""

    def export(self) -> dict[str, np.ndarray]:
        """The state as arrays by name, for a checkpoint."""
        return {}

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """Restores the exports of the `workers` workers of a saved run; `read` returns the export of a rank."""
        return

    def retune(self) -> bool:
        """Measures again if the exchange is `auto`; returns whether functions must be traced again."""
        return False

    def observed(self) -> dict[str, float]:
        """Statistics of the last exchange, by name, for TensorBoard."""
        return {}


class LocalReducer(Reducer):
    """One replica: its gradients are the sums.

    Args:
      shapes: Static shapes of the gradients.
      alone: Whether the replica has no peers for the exchange, however many replicas the strategy has.
    """

    def __init__(self, shapes: Sequence[tf.TensorShape], *, alone: bool = False) -> None:
        self._elements = sum(shape.num_elements() for shape in shapes)
        self._alone = alone

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns gradients and sidecar unchanged.

        Raises:
          RuntimeError: There are several replicas.
        """
        del should_apply
        replicas = 1 if self._alone else replica_context().num_replicas_in_sync
        if replicas > 1:
            raise RuntimeError(
                f"the exchange was built for one replica and runs on {replicas}: give build() its strategy"
            )
        return list(gradients), sidecar

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Bytes of one exchange: none for one replica."""
        return dense_traffic(self._elements, replicas, sidecar_length)


class SharedMemoryReducer(Reducer):
    """The sum over replicas whose devices share memory: they read the same result.

    The all-reduce of TensorFlow's strategy would copy gradients into buffers, the sums to each device, and the tensors
    out of them.

    Args:
      shapes: Static shapes of the gradients.
      device: The device that sums.
    """

    def __init__(self, shapes: Sequence[tf.TensorShape], device: str) -> None:
        self._elements = sum(shape.num_elements() for shape in shapes)
        self._device = device

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums gradients and sidecar over the replicas of this worker.

        Raises:
          RuntimeError: There are replicas on other workers.
        """
        del should_apply
        context = replica_context()
        if context.num_replicas_in_sync != local_replicas(context):
            raise RuntimeError("the exchange was built for one worker and runs on several: give build() its strategy")
        return reduce_per_worker(lambda *sums: sums, self._device, gradients, sidecar)

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Bytes of a ring over all replicas."""
        return dense_traffic(self._elements, replicas, sidecar_length)


class StrategyReducer(Reducer):
    """The all-reduce of TensorFlow's strategy: through the replica context, of buffers of fused tensors.

    Args:
      shapes: Static shapes of the gradients.
      bucket_bytes: Tensors are fused up to this many bytes.
    """

    def __init__(self, shapes: Sequence[tf.TensorShape], bucket_bytes: int) -> None:
        self._elements = sum(shape.num_elements() for shape in shapes)
        self._fusion = Fusion(shapes, bucket_bytes)

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums gradients and sidecar over the replicas of the strategy."""
        del should_apply
        context = replica_context()
        if context.num_replicas_in_sync == 1:
            return list(gradients), sidecar
        buffers = self._fusion.fuse(gradients, sidecar)
        return self._fusion.split(context.all_reduce(tf.distribute.ReduceOp.SUM, buffers))

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Bytes of a ring over all replicas."""
        return dense_traffic(self._elements, replicas, sidecar_length)


def dense_traffic(elements: int, replicas: int, sidecar_length: int) -> Traffic:
    """Bytes of a dense ring over all replicas."""
    payload = 4 * (elements + sidecar_length) if replicas > 1 else 0
    sent = 2 * (replicas - 1) * payload // replicas
    return Traffic("none", "all_reduce" if replicas > 1 else "local", payload, sent, sent)


def replica_context() -> tf.distribute.ReplicaContext:
    """The replica context.

    Raises:
      RuntimeError: Called outside of one.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError("an exchange runs in a replica context: call it inside the function given to strategy.run")
    return context


def local_replicas(context: tf.distribute.ReplicaContext) -> int:
    """Number of replicas of this worker."""
    # TensorFlow's default strategy, one replica, names no devices (2.21).
    return len(context.strategy.extended.worker_devices) if tf.distribute.has_strategy() else 1


def reduce_per_worker(
    reduce: Callable[[Sequence[Gradient], tf.Tensor], tuple[list[Gradient], tf.Tensor]],
    device: str,
    gradients: Sequence[Gradient],
    sidecar: tf.Tensor,
) -> tuple[list[Gradient], tf.Tensor]:
    """Leaves a replica context to sum between workers, once per worker.

    Args:
      reduce: Sums this worker's gradients and sidecar over the workers.
      device: The device on which this worker's part runs.
      gradients: Gradients of this replica. Those of the worker's replicas are added up first, in their order.
      sidecar: Float32 vector of this replica.

    Returns:
      The result of `reduce`, on every replica.

    Raises:
      RuntimeError: Called outside a replica context.
    """

    def merged(
        strategy: tf.distribute.Strategy, gradients: Sequence[Any], sidecar: Any
    ) -> tuple[list[Gradient], tf.Tensor]:
        with tf.device(device):
            return reduce([sum_local(strategy, gradient) for gradient in gradients], sum_local(strategy, sidecar))

    return replica_context().merge_call(merged, args=(list(gradients), sidecar))


def sum_local(strategy: tf.distribute.Strategy, value: Any) -> Gradient:
    """Sum over this worker's replicas, in their order; of rows, by row."""
    if isinstance(value, tuple):
        values, indices = map(strategy.experimental_local_results, value)
        if len(values) == 1:
            return values[0], indices[0]
        return summed_by_row(tf.concat(values, axis=0), tf.concat(indices, axis=0))
    parts = strategy.experimental_local_results(value)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total

"""The exchange interface and its dense form, `none`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.config import unknown_name

import tensorflow as tf

CODECS = ("none",)

# One collective call per bucket: a call costs about a millisecond on gRPC whatever its size, so small tensors
# travel together; past this size one more call no longer shows, and a single buffer would only cost memory.
BUCKET_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one exchange.

    Attributes:
      codec: Name of the codec.
      pattern: How payloads move.
      payload_bytes: Encoded gradient and sidecar of one replica, bytes.
      wire_bytes: Bytes each replica sends, by the formula of the pattern: `2 (N-1)/N x payload` for a ring.
    """

    codec: str
    pattern: str
    payload_bytes: int
    wire_bytes: int


class Exchange:
    """Sums gradients over the replicas of a strategy.

    Use inside a replica context (`strategy.run`), at the top level of the function given to it:

    ```python
    exchange = tfpar.Exchange("none")
    exchange.build(model.trainable_variables)

    @tf.function
    def step():
        def replica_step():
            ...
            return exchange.reduce(gradients)  # the mean over replicas, the same bits on each
        return strategy.run(replica_step)
    ```

    Args:
      spec: Codec and options. `none` is the dense float32 all-reduce of TensorFlow's runtime.

    Raises:
      ConfigError: An unknown spec, with the nearest known ones.
    """

    def __init__(self, spec: str = "none") -> None:
        if spec not in CODECS:
            raise unknown_name("--exchange", spec, CODECS)
        self.spec = spec
        self._shapes: list[tf.TensorShape] = []
        self._buckets: list[list[int]] = []

    def build(self, variables: Sequence[tf.Variable]) -> None:
        """Plans buckets for gradients shaped like `variables`.

        Args:
          variables: The trainable variables, in the order in which gradients will come. Keras variables,
            `tf.Variable`s, or anything else with a static `shape`.
        """
        self._shapes = [tf.TensorShape(variable.shape) for variable in variables]
        self._buckets = _fuse([shape.num_elements() * 4 for shape in self._shapes], BUCKET_BYTES)

    @property
    def state(self) -> list[tf.Variable]:
        """What the exchange carries from step to step on this replica (residuals); dense exchange carries nothing."""
        return []

    def reduce(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The mean of the gradients over all replicas.

        Args:
          gradients: Float tensors shaped like the variables given to `build`.

        Returns:
          The means: float32, the same bits on every replica.

        Raises:
          RuntimeError: Called outside a replica context.
        """
        replicas = _replica_context().num_replicas_in_sync
        sums, _ = self.reduce_sums(gradients, tf.zeros([0], tf.float32))
        return [value / replicas for value in sums]

    def reduce_sums(self, gradients: Sequence[tf.Tensor], sidecar: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums gradients and sidecar over all replicas.

        Args:
          gradients: Gradient sums of this replica, float32 tensors shaped like the variables given to `build`.
          sidecar: Float32 vector of scalars to sum along with them.

        Returns:
          The summed gradients and the summed sidecar, the same bits on every replica.

        Raises:
          RuntimeError: Called outside a replica context, or before `build`.
          ValueError: Another number of gradients than variables given to `build`.
        """
        context = _replica_context()
        if len(gradients) != len(self._shapes):
            raise ValueError(f"got {len(gradients)} gradients for {len(self._shapes)} variables; call build() first")
        if context.num_replicas_in_sync == 1:
            return [tf.cast(gradient, tf.float32) for gradient in gradients], sidecar
        flat = [tf.reshape(tf.cast(gradient, tf.float32), [-1]) for gradient in gradients]
        buffers = [tf.concat([flat[index] for index in bucket], axis=0) for bucket in self._buckets]
        # The sidecar rides in the last bucket: a call of its own would cost a round trip.
        buffers[-1] = tf.concat([buffers[-1], sidecar], axis=0)
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, buffers)
        result: list[tf.Tensor] = [None] * len(flat)
        for bucket, buffer in zip(self._buckets, summed, strict=True):
            sizes = [self._shapes[index].num_elements() for index in bucket]
            parts = tf.split(buffer, [*sizes, buffer.shape[0] - sum(sizes)])
            for index, part in zip(bucket, parts, strict=False):
                result[index] = tf.reshape(part, self._shapes[index])
            sidecar = parts[-1]
        return result, sidecar

    def traffic(self, replicas: int, sidecar_length: int) -> Traffic:
        """What one exchange costs on the wire.

        Args:
          replicas: Number of replicas N.
          sidecar_length: Scalars in the sidecar.
        """
        payload = 4 * (sum(shape.num_elements() for shape in self._shapes) + sidecar_length)
        wire = 2 * (replicas - 1) * payload // replicas
        return Traffic(self.spec, "all_reduce" if replicas > 1 else "local", payload if replicas > 1 else 0, wire)


def _replica_context() -> tf.distribute.ReplicaContext:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError("an exchange runs in a replica context: call it inside the function given to strategy.run")
    return context


def _fuse(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Groups consecutive tensors into buckets of at most `limit` bytes (one larger tensor is a bucket of its own)."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        if buckets[-1] and filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets

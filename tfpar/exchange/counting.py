"""Bytes of compressed exchanges, counted while they run: some of them send more than the encoded buckets.

Warm-up and a comparison with the dense sums send whole tensors, a ramp begins with larger payloads, and `auto` may have
had another plan before. What is reported is the mean over all exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.collectives.tensorflow import local_copy
from tfpar.exchange.buckets import Bucket, WireBytes, counter_variable

import tensorflow as tf


class ByteCounter:
    """Counts the bytes of this worker's exchanges.

    Args:
      name: Name of the variable.
    """

    def __init__(self, name: str) -> None:
        # Bytes of all exchanges so far, payload and sent, and the number of exchanges.
        self._total = counter_variable(3, name)

    def add(self, payload: tf.Tensor | int, sent: tf.Tensor | int, exchanges: int = 0) -> None:
        """Adds bytes, and exchanges that begin with them."""
        values = [tf.cast(value, tf.int64) for value in (payload, sent, exchanges)]
        local_copy(self._total).assign_add(tf.stack(values), read_value=False)

    def mean(self) -> WireBytes | None:
        """Bytes of an exchange: the mean of those so far; None before the first."""
        payload, sent, exchanges = local_copy(self._total).numpy().tolist()
        return WireBytes(round(payload / exchanges), round(sent / exchanges)) if exchanges else None


def bytes_of_exchange(
    buckets: Sequence[Bucket],
    dense: WireBytes,
    step: tf.Tensor,
    *,
    warmup_steps: int,
    compares: tf.Tensor | None,
) -> tf.Tensor:
    """Bytes of an exchange of all buckets, payload and sent: int64 [2].

    A bucket whose payload changes from step to step has a method `wire_bytes_at`, which returns the same for it alone.

    Args:
      buckets: The buckets.
      dense: Bytes of their tensors if these are sent unencoded.
      step: Int64 scalar: number of the exchange.
      warmup_steps: Number of exchanges at the start in which they are.
      compares: Bool scalar: whether the sums are compared with the dense ones; None: never.
    """
    parts = [tf.zeros([2], tf.int64)]
    for bucket in buckets:
        at = getattr(bucket, "wire_bytes_at", None)
        parts.append(at(step) if at else as_tensor(bucket.wire_bytes()))
    if compares is not None:
        parts.append(tf.where(compares, as_tensor(dense), tf.zeros([2], tf.int64)))
    return tf.where(step < warmup_steps, as_tensor(dense), tf.add_n(parts))


def ring_bytes(size: int, workers: int) -> WireBytes:
    """Bytes of an all-reduce of `size` bytes."""
    return WireBytes(size, 2 * (workers - 1) * size // workers)


def as_tensor(wire: WireBytes) -> tf.Tensor:
    """Payload and sent bytes, int64 [2]."""
    return tf.constant([wire.payload, wire.sent], tf.int64)

"""What the patterns have in common: a bucket of tensors, its state on this worker, its bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Protocol

from tfpar.collectives.tensorflow import PER_WORKER, local_copy
from tfpar_ops import Codec

import tensorflow as tf

# Names of the state that is gradient not yet delivered: by a worker for its own, float32 [L]; by the owner of a shard
# for the sum, of the elements of that shard. The owners' shards lie end to end in the order of the ranks.
RESIDUALS = ("worker", "owner")


@dataclasses.dataclass(frozen=True)
class Wire:
    """Bytes of one exchange of a bucket, per worker.

    Attributes:
      payload: What encoding this worker's gradients gives.
      sent: What it sends, framing of the transport left out.
    """

    payload: int
    sent: int


# Changes of a bucket's state that an exchange has not carried out: variable and new value.
Changes = list[tuple[tf.Variable, tf.Tensor]]


class Bucket(Protocol):
    """Tensors that are exchanged together, in one pattern.

    Attributes:
      elements: Elements L of all of them.
      shard_elements: Elements of the shard of which a worker is the owner; L where there are no owners.
      state: This worker's variables; those of `RESIDUALS` have mass that is to be delivered.
    """

    elements: int
    shard_elements: int
    state: dict[str, tf.Variable]

    def sum(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, changes: Changes | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers.

        Args:
          tensors: This worker's, float32, of the bucket's shapes.
          step: Int64 scalar, different for every exchange.
          changes: If given, takes the changes of `state`, which then stays as it is. Not with `momentum`
            or `ramp_steps`.

        Returns:
          The sums, the same bits on every worker, and the squared L2 norms of input and of the worker's new residual,
          float32 [2].
        """

    def wire(self) -> Wire:
        """Bytes per exchange and worker."""


def worker_variable(shape: Sequence[int], name: str, value: tf.Tensor | None = None) -> tf.Variable:
    """A float32 variable, zeros by default, that belongs to this worker alone, also when made under a strategy."""
    variable = tf.Variable(tf.zeros(shape) if value is None else value, trainable=False, name=name, **PER_WORKER)
    return local_copy(variable)


def change(variable: tf.Variable, value: tf.Tensor, changes: Changes | None) -> None:
    """Carries a change of state out, or notes it."""
    if changes is None:
        variable.assign(value, read_value=False)
    else:
        changes.append((variable, value))


def counter_variable(size: int, name: str) -> tf.Variable:
    """An int64 vector of zeros that belongs to this worker alone."""
    return local_copy(tf.Variable(tf.zeros([size], tf.int64), trainable=False, name=name, **PER_WORKER))


def seed_step(codec: Codec, seed: int, stream: int, step: tf.Tensor) -> tf.Tensor | None:
    """Seed and step of stochastic rounding; None for nearest.

    Args:
      codec: The codec.
      seed: Of the bucket, see `seed_of_bucket`.
      stream: Another number, below 4096, for every encoding of the bucket in a step anywhere in the cluster.
      step: Int64 scalar.
    """
    if codec.rounding != "stochastic":
        return None
    return tf.stack([tf.constant((seed << 12) + stream, tf.int64), tf.cast(step, tf.int64)])


def seed_of_bucket(seed: int, number: int) -> int:
    """Another seed, of 51 bits, for every bucket of a run: equal numbers would round alike in all of them."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 13

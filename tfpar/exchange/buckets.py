"""The common parts of the algorithms: a bucket of tensors, its state on this worker, its bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Protocol

from tfpar.collectives.tensorflow import PER_WORKER, local_copy
from tfpar_ops import Codec

import numpy as np
import tensorflow as tf

# Up to how many bytes of float32 tensors are fused into one bucket. A collective call costs about a millisecond on gRPC
# whatever its size, so small tensors travel together.
# Dense: above 32 MiB an additional call no longer matters, and a larger buffer would only cost memory. Encoded: half of
# that, because a worker encodes one bucket while another travels, and more buckets overlap more.
DENSE_BUCKET_BYTES = 32 << 20
COMPRESSED_BUCKET_BYTES = 16 << 20

_NORMS_EVERY = 8  # exchanges
_STREAMS = 1 << 12  # numbers of encodings beside one seed: with its 51 bits, they take those of an int64

# Names of the state that holds gradients not yet applied: the residual of a worker for its own gradient, float32 [L];
# the residual of the owner of a shard for the sum, of the elements of that shard. The owners' shards lie end to end in
# the order of the ranks.
RESIDUALS = ("worker", "owner")
# Names of the state that is in units of gradient sums: those, and the velocity of momentum correction.
IN_UNITS_OF_SUMS = (*RESIDUALS, "velocity")


@dataclasses.dataclass(frozen=True)
class WireBytes:
    """Bytes of one exchange of a bucket, per worker.

    Attributes:
      payload: Bytes of this worker's encoded gradients.
      sent: Bytes that this worker sends, framing of the transport left out.
      fewest: Bytes that the worker which sends the fewest sends: on all workers the same. None: all send as many.
    """

    payload: int
    sent: int
    fewest: int | None = None


@dataclasses.dataclass(frozen=True)
class Padding:
    """Positions of the tensors of a bucket in a vector in which each begins a block; see `whole_blocks`.

    Attributes:
      sizes: Elements of the tensors.
      block: Elements of a block.
    """

    sizes: tuple[int, ...]
    block: int

    @property
    def pads(self) -> list[int]:
        """Copies after each tensor; none after the last."""
        return [-size % self.block for size in self.sizes[:-1]] + [0] * bool(self.sizes)

    def tail(self, size: int) -> int:
        """Elements of a tensor in its last block, which are the ones copied."""
        return size % self.block or self.block

    def sources(self) -> np.ndarray:
        """For each element of the padded vector, its place in the vector without padding; int64."""
        parts, begin = [], 0
        for size, pads in zip(self.sizes, self.pads, strict=True):
            parts.append(np.arange(begin, begin + size))
            parts.append(begin + size - self.tail(size) + np.arange(pads) % self.tail(size))
            begin += size
        return np.concatenate(parts)

    def originals(self) -> np.ndarray:
        """For each element of the padded vector, whether it is an original, not a copy; bool."""
        pairs = zip(self.sizes, self.pads, strict=True)
        return np.concatenate([np.repeat([True, False], [size, pads]) for size, pads in pairs])


# State changes that an exchange has not carried out yet: variable and new value.
PendingAssigns = list[tuple[tf.Variable, tf.Tensor]]


class Bucket(Protocol):
    """Tensors that are exchanged together, by one algorithm.

    Attributes:
      elements: Elements L of all tensors, without padding.
      shard_elements: Elements of the shard of which a worker is the owner; L where there are no owners.
      factor_rank: Columns of low-rank factors in `state`, which a checkpoint must match; 0 where there are none.
      state: This worker's variables; those named in `RESIDUALS` hold gradient that is not yet applied, of a bucket
        that has a `padding` (a `Padding`) with copies.
    """

    elements: int
    shard_elements: int
    factor_rank: int
    state: dict[str, tf.Variable]

    def reduce(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers.

        Args:
          tensors: This worker's tensors, float32, of the bucket's shapes.
          step: Int64 scalar, different for every exchange.
          pending: If given, receives the changes of `state`, which is then not changed. Only where the options say
            `sends_only_gradient`.

        Returns:
          The sums, the same bits on every worker, and the squared L2 norms of input and of the worker's new residual,
          float32 [2]; NaN where they would take time and `measures_norms` is false.
        """

    def wire_bytes(self) -> WireBytes:
        """Bytes per exchange and worker."""


def worker_variable(shape: Sequence[int], name: str, value: tf.Tensor | None = None) -> tf.Variable:
    """A float32 variable, zeros by default, that belongs only to this worker, even if it is created under a
    strategy."""
    variable = tf.Variable(tf.zeros(shape) if value is None else value, trainable=False, name=name, **PER_WORKER)
    return local_copy(variable)


def residual_variables(sizes: dict[str, int], name: str, *, error_feedback: bool) -> dict[str, tf.Variable]:
    """The residuals of a bucket by role, zeros; none without error feedback.

    Args:
      sizes: Elements by role, one of `RESIDUALS`.
      name: Prefix of the variables' names.
      error_feedback: Whether there are residuals.
    """
    if not error_feedback:
        return {}
    return {role: worker_variable([size], f"{name}_{role}") for role, size in sizes.items()}


def assign_or_defer(variable: tf.Variable, value: tf.Tensor, pending: PendingAssigns | None) -> None:
    """Assigns a new value, or leaves the assignment to the caller, in `pending`."""
    if pending is None:
        variable.assign(value, read_value=False)
    else:
        pending.append((variable, value))


def counter_variable(size: int, name: str) -> tf.Variable:
    """An int64 vector of zeros that belongs only to this worker."""
    return local_copy(tf.Variable(tf.zeros([size], tf.int64), trainable=False, name=name, **PER_WORKER))


def concatenated(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All tensors as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def split(vector: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """The tensors from a vector that `concatenated` returned."""
    parts = tf.split(vector, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def given_away(tensors: list[tf.Tensor], kept: tf.Tensor | None) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Tensors for an exchange, whose sums take their memory unless the tensors are kept.

    Args:
      tensors: Tensors of any shapes, which nothing else reads later.
      kept: Bool scalar: whether they are needed once more after the exchange. None if they never are.

    Returns:
      The tensors for the exchange, and the same as vectors, which have no elements if they are not kept. No vectors if
      `kept` is None.
    """
    if kept is None:
        return tensors, []
    vectors = tf.cond(
        kept,
        lambda: [tf.reshape(tensor, [-1]) for tensor in tensors],
        lambda: [tf.zeros([0], tensor.dtype) for tensor in tensors],
    )
    with tf.control_dependencies(vectors):  # by then, nothing else holds a tensor that is not kept
        return [tf.identity(tensor) for tensor in tensors], vectors


def measures_norms(step: tf.Tensor) -> tf.Tensor:
    """Whether the norms of an exchange are measured: of every eighth, as they take up to half the time of encoding.

    Args:
      step: Int64 scalar, different for every exchange.
    """
    return tf.equal(step % _NORMS_EVERY, 0)


def rounding_seed(codec: Codec, seed: int, stream: int, step: tf.Tensor) -> tf.Tensor | None:
    """Seed and step of stochastic rounding, int64 [2]; None for rounding to nearest.

    Args:
      codec: The codec.
      seed: Seed of the bucket, see `bucket_seed`.
      stream: A number from 0, different for every encoding of the bucket in a step anywhere in the cluster.
      step: Int64 scalar.
    """
    if codec.rounding != "stochastic":
        return None
    more, number = divmod(stream, _STREAMS)
    if more:  # in a ring of N workers, for example, which encodes N^2 times
        seed = bucket_seed(seed, more)
    return tf.stack([tf.constant(seed * _STREAMS + number, tf.int64), tf.cast(step, tf.int64)])


def bucket_seed(seed: int, index: int) -> int:
    """A distinct 51-bit seed per bucket, so that equal values do not round the same way in all buckets."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 13

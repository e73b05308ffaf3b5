"""The two phases of sharded optimizer state for one vector: gradients to their owners, new weights to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tfpar_ops
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.config import ConfigError
from tfpar.exchange import buckets
from tfpar.exchange.sharding.shards import ShardedVector
from tfpar_ops import Codec

import numpy as np
import tensorflow as tf


class ShardPhases:
    """The two phases of one vector.

    Args:
      vector: Its tensors and shards.
      shapes: Static shapes of all tensors, by index.
      codec: Encodes gradients and changes of weights; None sends gradients and weights as they are.
      group: All workers.
      seed: Seed of stochastic rounding.
      name: Prefix of the residual's name.
      error_feedback: Whether there is a residual.

    Attributes:
      vector: Its tensors and shards.
      state: The residual of this worker's gradients, padding included; empty without error feedback, unless a saved run
        had one.
      payload_bytes: Bytes of this worker's payloads for all shards.
    """

    def __init__(
        self,
        vector: ShardedVector,
        shapes: Sequence[tf.TensorShape],
        codec: Codec | None,
        group: Group,
        seed: int,
        name: str,
        *,
        error_feedback: bool,
    ) -> None:
        self.vector = vector
        self._shapes = shapes
        self._codec = codec
        self._group = group
        self._seed = seed
        owners = range(group.rank * vector.per_worker, (group.rank + 1) * vector.per_worker)
        self._pieces = [vector.pieces(owner) for owner in owners]
        self._elements = vector.worker_elements
        self._instances = allocate_instance_keys(2, group)
        total = sum(size for _, size in vector.segments)
        self._sizes, self._name = {buckets.RESIDUALS[0]: total}, name
        self.state = buckets.residual_variables(self._sizes, name, error_feedback=error_feedback)
        size = 4 * self._elements if codec is None else codec.payload_bytes(self._elements)
        self.payload_bytes = vector.workers * size

    def load(self, residual: np.ndarray) -> None:
        """Sets the residual, which goes out with the next gradients; without a codec all of it, and then none is left.

        Raises:
          ConfigError: Part of it would stay behind and be lost.
        """
        if residual.any() and not self.state:
            if self._codec is not None:
                raise ConfigError(
                    "--exchange: the checkpoint holds a residual that has not been applied yet, which "
                    "error_feedback=false would lose. Resume with error_feedback=true, or start in another workdir."
                )
            self.state = buckets.residual_variables(self._sizes, self._name, error_feedback=True)
        for variable in self.state.values():
            variable.assign(residual)

    def scatter(self, gradients: Sequence[tf.Tensor], step: tf.Tensor) -> tf.Tensor:
        """The sum of this worker's shards over the workers, a vector."""
        vector, first = self.vector, self._instances[0]
        parts = [tf.zeros([size]) if index < 0 else gradients[index] for index, size in vector.segments]
        if self._codec is None:
            flat = buckets.concatenated(parts)
            for variable in self.state.values():
                flat = flat + variable.read_value()
                with tf.control_dependencies([flat]):
                    variable.assign(tf.zeros_like(flat), read_value=False)
            rows = tf.reshape(flat, [vector.workers, self._elements])
            received = self._group.all_to_all(rows, first)
            return tf.add_n(tf.unstack(received)) if vector.workers > 1 else received[0]
        arguments: dict[str, Any] = {
            "shards": vector.workers,
            "shard_elements": self._elements,
            "seed_step": self._rounding_seed(step, phase=0),
        }
        if self.state:
            encoded = tfpar_ops.encode_into(self.state[buckets.RESIDUALS[0]], parts, self._codec, **arguments)
        else:
            encoded = tfpar_ops.encode(parts, None, self._codec, **arguments)
        received = self._group.all_to_all(encoded.payload, first)
        return tfpar_ops.decode_sum(received, self._codec, self._elements)

    def cut(self, shards: tf.Tensor) -> list[tf.Tensor]:
        """The pieces of this worker's shards, each a vector: those of its first replica, then of its second."""
        found: list[tf.Tensor] = []
        for pieces, shard in zip(self._pieces, tf.split(shards, self.vector.per_worker), strict=True):
            sizes = [piece.size for piece in pieces]
            found += tf.split(shard, [*sizes, self.vector.shard_elements - sum(sizes)])[: len(sizes)]
        return found

    def gather(
        self, pieces: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], step: tf.Tensor
    ) -> dict[int, tf.Tensor]:
        """New weights by index, out of what each owner has made of its pieces."""
        vector, second = self.vector, self._instances[1]
        if self._codec is None:
            rows = self._group.all_gather(self._shards(pieces)[None], second)
            parts = tf.split(tf.reshape(rows, [-1]), [size for _, size in vector.segments])
            flat = {index: part for (index, _), part in zip(vector.segments, parts, strict=True) if index >= 0}
            return {index: tf.reshape(part, self._shapes[index]) for index, part in flat.items()}
        owned = [piece for pieces in self._pieces for piece in pieces]
        before = [tf.reshape(weights[piece.index], [-1])[piece.begin : piece.end] for piece in owned]
        change = self._shards(pieces) - self._shards(before)
        encoded = tfpar_ops.encode(
            [change],
            None,
            self._codec,
            shard_elements=self._elements,
            seed_step=self._rounding_seed(step, phase=1),
        )
        payloads = self._group.all_gather(encoded.payload, second)
        shapes = [self._shapes[index] if index >= 0 else tf.TensorShape([size]) for index, size in vector.segments]
        changes = tfpar_ops.decode(payloads, self._codec, shapes, shard_elements=self._elements)
        return {
            index: weights[index] + part
            for (index, _), part in zip(vector.segments, changes, strict=True)
            if index >= 0
        }

    def _shards(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """The vector that `cut` cuts into pieces, with zeros in place of padding."""
        rest, parts = iter(values), []
        for pieces in self._pieces:
            parts += [tf.reshape(next(rest), [-1]) for _ in pieces]
            parts.append(tf.zeros([self.vector.shard_elements - sum(piece.size for piece in pieces)]))
        return tf.concat(parts, axis=0)

    def _rounding_seed(self, step: tf.Tensor, *, phase: int) -> tf.Tensor | None:
        if self._codec is None:
            return None
        return buckets.rounding_seed(self._codec, self._seed, 2 * self._group.rank + phase, step)

"""The two phases of sharded optimizer state for one vector: gradients to their owners, new weights to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
      codec: Encodes gradients and changes of weights; None sends gradients and weights unencoded.
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

    def load(self, residual: np.ndarray, *, keeps: bool) -> None:
        """Sets the residual, which is sent with the next gradients; without a codec all of it, so that none is left.

        Args:
          residual: That of this worker.
          keeps: Whether any worker has one, so that all of them need a variable: with state, workers call collectives
            in another order than without, and save their count of exchanges.

        Raises:
          ConfigError: Part of it would be lost.
        """
        if keeps and not self.state:
            if self._codec is not None:
                raise ConfigError(
                    "--exchange: the checkpoint holds a residual that has not been applied yet, which "
                    "error_feedback=false would lose. Resume with error_feedback=true, or start in another workdir."
                )
            self.state = buckets.residual_variables(self._sizes, self._name, error_feedback=True)
        for variable in self.state.values():
            variable.assign(residual)

    def scatter(self, gradients: Sequence[tf.Tensor], step: tf.Tensor) -> tf.Tensor:
        """The sum of this worker's shards over the workers, a vector. Changes the residual."""
        if self._codec is None or not self.state:
            total, residual = self.scatter_aside(gradients, self.residual(), step)
            with tf.control_dependencies([total]):
                self.store(residual)
            return total
        [variable] = self.state.values()
        encoded = tfpar_ops.encode_into(variable, self._parts(gradients), self._codec, **self._encoding(step))
        return self._decoded_sum(encoded.payload)

    def scatter_aside(
        self, gradients: Sequence[tf.Tensor] | Mapping[int, tf.Tensor], residual: list[tf.Tensor], step: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """`scatter` without a change of the residual, for use before it is known whether the step is applied.

        Args:
          gradients: By index.
          residual: From `residual`, or the result of an earlier call.
          step: Int64 scalar, different for every call.

        Returns:
          The sum; the new residual, for `store`.
        """
        parts = self._parts(gradients)
        if self._codec is None:
            flat = tf.add_n([buckets.concatenated(parts), *residual])
            rows = tf.reshape(flat, [self.vector.workers, self._elements])
            total = self._group.reduce_scatter(rows, self._instances[0])[0]
            return total, [tf.zeros_like(each) for each in residual]
        given = residual[0] if residual else None
        encoded = tfpar_ops.encode(parts, given, self._codec, **self._encoding(step))
        return self._decoded_sum(encoded.payload), [encoded.residual] if residual else []

    def residual(self) -> list[tf.Tensor]:
        """The value of the residual, if there is one."""
        return [variable.read_value() for variable in self.state.values()]

    def store(self, residual: Sequence[tf.Tensor]) -> None:
        """Stores the residual that `scatter_aside` returned."""
        for variable, value in zip(self.state.values(), residual, strict=True):
            variable.assign(value, read_value=False)

    def _parts(self, gradients: Sequence[tf.Tensor] | Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
        return [tf.zeros([size]) if index < 0 else gradients[index] for index, size in self.vector.segments]

    def _encoding(self, step: tf.Tensor) -> dict[str, Any]:
        """Arguments of the first encoding."""
        return {
            "shards": self.vector.workers,
            "shard_elements": self._elements,
            "seed_step": self._rounding_seed(step, phase=0),
            "measures_norms": False,
        }

    def _decoded_sum(self, payload: tf.Tensor) -> tf.Tensor:
        assert self._codec is not None
        received = self._group.all_to_all(payload, self._instances[0])
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
        """New weights by index, assembled from the new pieces of all owners."""
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
            measures_norms=False,
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

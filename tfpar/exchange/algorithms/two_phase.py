"""Compressed exchange of one bucket between workers, in patterns that TensorFlow has collectives for.

L elements in a bucket, W workers, S elements in a shard. Functions run once per worker, on its first device.
"""

from __future__ import annotations

from collections.abc import Sequence

import tfpar_ops
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange import buckets
from tfpar.exchange.buckets import Changes, Wire
from tfpar.exchange.spec import Spec
from tfpar_ops import Codec

import tensorflow as tf


class Collective:
    """Tensors that are encoded and sent as one vector of L elements.

    Two patterns:

    - `two_phase`: the vector is cut into W shards. Every worker sends shard w of its payloads to worker w (all-to-all),
      which decodes and sums what it got, adds its own residual and encodes the sum once more; these payloads go to all
      (all-gather). A worker sends 2 (W - 1) / W payloads, whatever W is.
    - `all_gather`: every worker sends its whole payload to all, and all sum them up: one lossy step and one call less,
      but W - 1 payloads.

    Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what a payload leaves out is kept and added to the next
    one, by the worker for its gradients and, in `two_phase`, by the owner of a shard for the sum.

    Args:
      spec: The exchange; it has a codec.
      shapes: Static shapes of the tensors.
      group: All workers.
      seed: Seed of stochastic rounding.
      name: Of the residual variables.
      state: Variables of another bucket with the same blocks, to share; by default new ones.
    """

    def __init__(
        self,
        spec: Spec,
        shapes: Sequence[tf.TensorShape],
        group: Group,
        seed: int,
        name: str,
        *,
        state: dict[str, tf.Variable] | None = None,
    ) -> None:
        assert spec.codec is not None
        self.codec: Codec = spec.codec
        self.shapes = list(shapes)
        self.elements = sum(shape.num_elements() for shape in shapes)
        self._group = group
        self._seed = seed
        self._two_phase = spec.pattern != "all_gather"
        self._instances = allocate_instance_keys(2)
        self._shards = group.size if self._two_phase else 1
        blocks = -(-self.codec.blocks(self.elements) // self._shards)
        self.shard_elements = blocks * self.codec.block if self._two_phase else self.elements
        self._valid = min(max(self.elements - group.rank * self.shard_elements, 0), self.shard_elements)
        # Owner's residual: of the elements that exist in this worker's shard.
        sizes = [self.elements, self._valid] if self._two_phase else [self.elements]
        self.state = (
            state
            if state is not None
            else {
                role: buckets.worker_variable([size], f"{name}_{role}")
                for size, role in zip(sizes, buckets.RESIDUALS, strict=False)
            }
            if spec.error_feedback
            else {}
        )

    def sum(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, changes: Changes | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers.

        Args:
          tensors: This worker's, float32, of the bucket's shapes.
          step: Int64 scalar, different for every exchange.
          changes: See `buckets.Bucket`. Then residuals are copied as they are changed.

        Returns:
          The sums, the same bits on every worker, and the squared L2 norms of input and of the worker's new residual,
          float32 [2].
        """
        encoded = self._encode(tensors, step, changes)
        first, second = self._instances
        if not self._two_phase:
            payloads = self._group.all_gather(encoded.payload, first)
            flat = tfpar_ops.decode_sum(payloads, self.codec, self.elements)
            parts = tf.split(flat, [shape.num_elements() for shape in self.shapes])
            return [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes, strict=True)], encoded.norms
        rows = self._group.all_to_all(encoded.payload, first)
        payloads = self._group.all_gather(self._recode(rows, step, changes).payload, second)
        sums = tfpar_ops.decode(payloads, self.codec, self.shapes, shard_elements=self.shard_elements)
        return sums, encoded.norms

    def wire(self) -> Wire:
        """Bytes per exchange and worker."""
        payload = self.codec.payload_bytes(self.shard_elements)
        phases = 2 if self._two_phase else 1
        return Wire(payload=payload * self._shards, sent=phases * payload * (self._group.size - 1))

    def _encode(self, tensors: Sequence[tf.Tensor], step: tf.Tensor, changes: Changes | None) -> tfpar_ops.Encoded:
        arguments = {"shards": self._shards, "shard_elements": self.shard_elements}
        seed_step = self._seed_step(step, phase=0)
        if self.state and changes is None:
            return tfpar_ops.encode_into(self.state["worker"], tensors, self.codec, seed_step=seed_step, **arguments)
        residual = self.state["worker"].read_value() if self.state else None
        return self._noted(
            "worker", tfpar_ops.encode(tensors, residual, self.codec, seed_step=seed_step, **arguments), changes
        )

    def _recode(self, rows: tf.Tensor, step: tf.Tensor, changes: Changes | None) -> tfpar_ops.Encoded:
        begin = self._group.rank * self.shard_elements
        seed_step = self._seed_step(step, phase=1)
        arguments = {"begin": begin, "valid": self._valid, "seed_step": seed_step}
        if self.state and changes is None:
            return tfpar_ops.recode_into(self.state["owner"], rows, self.codec, self.shard_elements, **arguments)
        residual = self.state["owner"].read_value() if self.state else None
        return self._noted(
            "owner", tfpar_ops.recode(rows, residual, self.codec, self.shard_elements, **arguments), changes
        )

    def _noted(self, role: str, encoded: tfpar_ops.Encoded, changes: Changes | None) -> tfpar_ops.Encoded:
        if encoded.residual is not None:
            buckets.change(self.state[role], encoded.residual, changes)
        return encoded

    def _seed_step(self, step: tf.Tensor, *, phase: int) -> tf.Tensor | None:
        return buckets.seed_step(self.codec, self._seed, 2 * self._group.rank + phase, step)

"""Compressed exchange of one bucket between workers, in patterns of collective calls; or the same in one operation.

L elements in a bucket, W workers, S elements in a shard. Functions run once per worker, on its first device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tfpar_ops
from tfpar.collectives import cost_model
from tfpar.collectives.cost_model import Cost, Link, Speed
from tfpar.collectives.group import Group, Pipelined, allocate_instance_keys
from tfpar.exchange import buckets
from tfpar.exchange.buckets import PendingAssigns, WireBytes
from tfpar_ops import Codec

import tensorflow as tf


class TwoPhase:
    """Tensors that are encoded and sent as one vector of L elements.

    Two patterns:

    - `two_phase`: the vector is cut into W shards. Every worker sends shard w of its payloads to worker w (all-to-all),
      which decodes and sums what it got, adds its own residual and encodes the sum once more; these payloads go to all
      (all-gather). A worker sends 2 (W - 1) / W payloads, whatever W is.
    - `all_gather`: every worker sends its whole payload to all, and all sum them up: one lossy step and one call less,
      but W - 1 payloads.

    Error feedback (Seide et al. 2014; Karimireddy et al. 2019): the residual of a payload is added to the next one, by
    the worker for its gradients and, in `two_phase`, by the owner of a shard for the sum.

    Args:
      codec: The codec.
      shapes: Static shapes of the tensors.
      group: All workers.
      seed: Seed of stochastic rounding.
      name: Prefix of the residual variables' names.
      error_feedback: Whether there are residuals.
      all_gather: The second pattern instead of the first.
      pipeline: Whether the first pattern is one operation, which works in chunks, where the group has one. The results
        have the same bits.
      state: Residuals of another bucket with the same blocks, to share; by default new ones.
    """

    factor_rank = 0

    def __init__(
        self,
        codec: Codec,
        shapes: Sequence[tf.TensorShape],
        group: Group,
        seed: int,
        name: str,
        *,
        error_feedback: bool,
        all_gather: bool = False,
        pipeline: bool = False,
        state: dict[str, tf.Variable] | None = None,
    ) -> None:
        self.codec = codec
        self.shapes = list(shapes)
        self.elements = sum(shape.num_elements() for shape in shapes)
        self._group = group
        self._seed = seed
        self._two_phase = not all_gather
        usable = pipeline and not all_gather and not codec.format.keeps
        self._pipelined = group if usable and isinstance(group, Pipelined) else None
        self._instances = allocate_instance_keys(2, group)
        self._shards = group.size if self._two_phase else 1
        blocks = -(-self.codec.blocks(self.elements) // self._shards)
        self.shard_elements = blocks * self.codec.block if self._two_phase else self.elements
        self._valid = min(max(self.elements - group.rank * self.shard_elements, 0), self.shard_elements)
        # Owner's residual: of the elements that exist in this worker's shard.
        sizes = [self.elements, self._valid] if self._two_phase else [self.elements]
        by_role = dict(zip(buckets.RESIDUALS, sizes, strict=False))
        self.state = (
            buckets.residual_variables(by_role, name, error_feedback=error_feedback) if state is None else state
        )

    def reduce(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers; see `buckets.Bucket`. With `pending`, residuals are copied as they change."""
        if self._pipelined is not None:
            return self._reduce_pipelined(self._pipelined, tensors, step, pending)
        encoded = self._encode(tensors, step, pending)
        first, second = self._instances
        if not self._two_phase:
            payloads = self._group.all_gather(encoded.payload, first)
            flat = tfpar_ops.decode_sum(payloads, self.codec, self.elements)
            return buckets.split(flat, self.shapes), encoded.norms
        rows = self._group.all_to_all(encoded.payload, first)
        payloads = self._group.all_gather(self._recode(rows, step, pending).payload, second)
        sums = tfpar_ops.decode(payloads, self.codec, self.shapes, shard_elements=self.shard_elements)
        return sums, encoded.norms

    def wire_bytes(self) -> WireBytes:
        """Bytes per exchange and worker."""
        payload = self.codec.payload_bytes(self.shard_elements)
        phases = 2 if self._two_phase else 1
        return WireBytes(payload=payload * self._shards, sent=phases * payload * (self._group.size - 1))

    def _encode(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None
    ) -> tfpar_ops.Encoded:
        arguments: dict[str, Any] = {
            "shards": self._shards,
            "shard_elements": self.shard_elements,
            "seed_step": self._rounding_seed(step, phase=0),
            "measures_norms": buckets.measures_norms(step),
        }
        if self.state and pending is None:
            return tfpar_ops.encode_into(self.state["worker"], tensors, self.codec, **arguments)
        residual = self.state["worker"].read_value() if self.state else None
        return self._store_residual("worker", tfpar_ops.encode(tensors, residual, self.codec, **arguments), pending)

    def _recode(self, rows: tf.Tensor, step: tf.Tensor, pending: PendingAssigns | None) -> tfpar_ops.Encoded:
        begin = self._group.rank * self.shard_elements
        seed_step = self._rounding_seed(step, phase=1)
        arguments = {"begin": begin, "valid": self._valid, "seed_step": seed_step, "measures_norms": False}
        if self.state and pending is None:
            return tfpar_ops.recode_into(self.state["owner"], rows, self.codec, self.shard_elements, **arguments)
        residual = self.state["owner"].read_value() if self.state else None
        return self._store_residual(
            "owner", tfpar_ops.recode(rows, residual, self.codec, self.shard_elements, **arguments), pending
        )

    def _store_residual(
        self, role: str, encoded: tfpar_ops.Encoded, pending: PendingAssigns | None
    ) -> tfpar_ops.Encoded:
        if encoded.residual is not None:
            buckets.assign_or_defer(self.state[role], encoded.residual, pending)
        return encoded

    def _reduce_pipelined(
        self, group: Pipelined, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """As `reduce`, in one operation."""
        seeds = [self._rounding_seed(step, phase=phase) for phase in (0, 1)]
        seed_steps = tf.zeros([2, 2], tf.int64) if seeds[0] is None else tf.stack(seeds)
        residuals = [self.state[role] for role in buckets.RESIDUALS if self.state]
        if not residuals or pending is not None:
            residuals = [variable.read_value() for variable in residuals] or [tf.zeros([0])] * 2
        measures_norms = buckets.measures_norms(step)
        result = group.exchange(tensors, self.codec, residuals, seed_steps, measures_norms, self._instances[0])
        if result.residuals is not None and self.state:
            for role, residual in zip(buckets.RESIDUALS, result.residuals, strict=True):
                buckets.assign_or_defer(self.state[role], residual, pending)
        return list(result.sums), result.norms

    def _rounding_seed(self, step: tf.Tensor, *, phase: int) -> tf.Tensor | None:
        return buckets.rounding_seed(self.codec, self._seed, 2 * self._group.rank + phase, step)


def cost(
    codec: Codec,
    elements: int,
    workers: int,
    link: Link,
    speed: Speed,
    *,
    all_gather: bool = False,
    pipeline: bool = False,
) -> Cost:
    """The cost of exchanging one vector, see `registry.register`; `pipeline` as for `TwoPhase`."""
    gradient = 4 * elements
    if all_gather:
        compute = speed.encoding(gradient) + speed.decoding(gradient, workers)
        rounds = 1 if link.is_direct else workers - 1
        return cost_model.messages((workers - 1) * codec.payload_bytes(elements), rounds, link, compute)
    shard = -(-codec.blocks(elements) // workers) * codec.block
    payload = codec.payload_bytes(shard)
    # Own gradient encoded; N payloads of a shard summed and, while in the caches, encoded; all shards decoded.
    compute = speed.encoding(gradient * (1 + 1 / workers)) + gradient / speed.decode + speed.decoding(gradient)
    # The all-to-all sends all at once; TensorFlow's all-gather goes around in a ring.
    rounds = 2 if link.is_direct else workers
    pieces = link.pieces(payload) if pipeline and not codec.format.keeps else 1
    return cost_model.messages(2 * (workers - 1) * payload, rounds, link, compute, pieces)

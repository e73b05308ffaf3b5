"""Compressed exchange of one bucket in rounds of messages between two workers: `ring`, `binary_blocks` and the like.

L elements in a bucket, S in a shard. Functions run once per worker, on its first device.
"""

from __future__ import annotations

from collections.abc import Sequence

import tfpar_ops
from tfpar.collectives import cost_model
from tfpar.collectives.cost_model import Cost, Link, Speed
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange import buckets
from tfpar.exchange.algorithms import message_plans
from tfpar.exchange.buckets import PendingAssigns, WireBytes
from tfpar_ops import Codec

import tensorflow as tf


class PointToPoint:
    """A bucket that is exchanged by a `message_plans.MessagePlan`.

    Partial sums are encoded again for every message, and the full sum of a shard once more by its owner. As a worker
    sends, or owns, each element exactly once, one residual of L elements holds everything that it has not sent.

    Every message is one more lossy step than `two_phase` takes: log2 N or N - 1 of them before the owner's own. These
    patterns are for networks where all-to-all is slow.

    Args:
      codec: The codec.
      shapes: Static shapes of the tensors.
      group: All workers.
      seed: Seed of stochastic rounding.
      name: Prefix of the residual variable's name.
      error_feedback: Whether there is a residual.
      pattern: One of `message_plans.PLANS`.
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
        pattern: str,
    ) -> None:
        self.codec = codec
        self.shapes = list(shapes)
        self.elements = sum(shape.num_elements() for shape in shapes)
        self._group = group
        self._seed = seed
        self._plan = message_plans.PLANS[pattern](group.size)
        shards = self._plan.shards
        self.shard_elements = max(1, -(-self.codec.blocks(self.elements) // shards)) * self.codec.block
        bounds = [min(shard * self.shard_elements, self.elements) for shard in range(shards + 1)]
        self._bounds = bounds
        self._sizes = [bounds[shard + 1] - bounds[shard] for shard in range(shards)]
        self._words = self.codec.payload_bytes(self.shard_elements) // 4
        self._keys = allocate_instance_keys(
            sum(len(phase) for phase in (*self._plan.reduce, *self._plan.gather)), group
        )
        self.state = buckets.residual_variables({"worker": self.elements}, name, error_feedback=error_feedback)

    def reduce(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers; see `buckets.Bucket`."""
        flat = buckets.concatenated(tensors)
        run = _Exchange(self, flat, step)
        keys = iter(self._keys)
        for phase in self._plan.reduce:
            run.reduce(phase, [next(keys) for _ in phase])
        rows = run.own_rows()
        for phase in self._plan.gather:
            rows |= self._gather(phase, rows, [next(keys) for _ in phase], run.sent)
        with tf.control_dependencies(run.sent):
            payloads = tf.concat([rows[shard] for shard in range(self._plan.shards)], axis=0)
        sums = tfpar_ops.decode(payloads, self.codec, self.shapes, shard_elements=self.shard_elements)
        measures = buckets.measures_norms(step)
        norm = tf.cond(measures, lambda: tfpar_ops.norm_squared([flat])[0], lambda: tf.constant(float("nan")))
        return sums, tf.stack([norm, run.finish(pending)])

    def wire_bytes(self) -> WireBytes:
        """Bytes per exchange and worker; with `binary_blocks`, of this one."""
        payload, plan = self.codec.payload_bytes(self.shard_elements), self._plan
        fewest = min(map(plan.sent_shards, range(self._group.size)))
        return WireBytes(payload * plan.shards, payload * plan.sent_shards(self._group.rank), payload * fewest)

    def _gather(
        self, phase: message_plans.Round, rows: dict[int, tf.Tensor], keys: Sequence[int], sent: list[tf.Tensor]
    ) -> dict[int, tf.Tensor]:
        """Passes encoded sums on; returns those that arrive."""
        arrived: dict[int, tf.Tensor] = {}
        for move, key in zip(phase, keys, strict=True):
            if move.source == self._group.rank:
                payload = tf.concat([rows[shard] for shard in range(move.first, move.last)], axis=0)
                sent.append(self._group.send(payload, move.target, key))
            elif move.target == self._group.rank:
                payload = self._receive(move, key)
                arrived |= dict(zip(range(move.first, move.last), tf.split(payload, move.shards), strict=True))
        return arrived

    def _receive(self, move: message_plans.Transfer, key: int) -> tf.Tensor:
        return self._group.receive(tf.TensorShape([move.shards, self._words]), tf.int32, move.source, key)


class _Exchange:
    """The reducing half of one exchange: this worker's part of each shard, and its new residual so far."""

    def __init__(self, bucket: PointToPoint, flat: tf.Tensor, step: tf.Tensor) -> None:
        self.sent: list[tf.Tensor] = []
        self._bucket = bucket
        self._step = step
        self._held = dict(enumerate(tf.split(flat, bucket._sizes)))
        self._residual = bucket.state["worker"].read_value() if bucket.state else None
        self._residuals: dict[int, tf.Tensor] = {}  # new residuals, by the first shard of their range
        self._norms: list[tf.Tensor] = []
        self._encodings = 0

    def reduce(self, phase: message_plans.Round, keys: Sequence[int]) -> None:
        """Sends partial sums, and adds those that arrive to this worker's own."""
        bucket, rank = self._bucket, self._bucket._group.rank
        arrived: dict[int, list[tf.Tensor]] = {}
        for move, key in zip(phase, keys, strict=True):
            if move.source == rank:
                self.sent.append(bucket._group.send(self._encode(move.first, move.last), move.target, key))
            elif move.target == rank:
                parts = tfpar_ops.decode(
                    bucket._receive(move, key),
                    bucket.codec,
                    [[size] for size in bucket._sizes[move.first : move.last]],
                    shard_elements=bucket.shard_elements,
                )
                for shard, part in zip(range(move.first, move.last), parts, strict=True):
                    arrived.setdefault(shard, []).append(part)
        for shard, parts in arrived.items():
            self._held[shard] = tf.add_n([self._held[shard], *parts])

    def own_rows(self) -> dict[int, tf.Tensor]:
        """The encoded sums of the remaining shards: those that this worker owns."""
        return {shard: self._encode(shard, shard + 1) for shard in list(self._held)}

    def finish(self, pending: PendingAssigns | None) -> tf.Tensor:
        """Assigns the residual, or leaves that to the caller; returns its squared L2 norm."""
        if self._residual is None:
            return tf.zeros([])
        residual = tf.concat([self._residuals[first] for first in sorted(self._residuals)], axis=0)
        buckets.assign_or_defer(self._bucket.state["worker"], residual, pending)
        return tf.add_n(self._norms)

    def _encode(self, first: int, last: int) -> tf.Tensor:
        """Payloads of a range of shards, which this worker then gives up."""
        bucket, bounds = self._bucket, self._bucket._bounds
        encoded = tfpar_ops.encode(
            [self._held.pop(shard) for shard in range(first, last)],
            None if self._residual is None else self._residual[bounds[first] : bounds[last]],
            bucket.codec,
            shards=last - first,
            shard_elements=bucket.shard_elements,
            seed_step=buckets.rounding_seed(bucket.codec, bucket._seed, self._stream(), self._step),
            measures_norms=buckets.measures_norms(self._step),
        )
        if encoded.residual is not None:
            self._residuals[first] = encoded.residual
            self._norms.append(encoded.norms[1])
        return encoded.payload

    def _stream(self) -> int:
        self._encodings += 1
        return self._bucket._group.rank + self._bucket._group.size * self._encodings


def cost(codec: Codec, elements: int, workers: int, link: Link, speed: Speed, *, pattern: str) -> Cost:
    """The cost of exchanging one vector, see `registry.register`."""
    plan = message_plans.PLANS[pattern](workers)
    shard = -(-codec.blocks(elements) // plan.shards) * codec.block
    critical = plan.critical_shards() * codec.payload_bytes(shard)
    gradient = 4 * elements
    compute = speed.encoding(gradient) + 2 * speed.decoding(gradient)
    return cost_model.messages(critical, len(plan.reduce) + len(plan.gather), link, compute)

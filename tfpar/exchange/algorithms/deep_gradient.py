"""What Deep Gradient Compression adds to `topk` (Lin et al. 2018): momentum correction, factor masking, a ramp.

Functions run once per worker, on its first device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.collectives.group import Group
from tfpar.exchange import buckets
from tfpar.exchange.algorithms.two_phase import Collective
from tfpar.exchange.buckets import Bucket, Changes, Wire
from tfpar.exchange.spec import Spec

import tensorflow as tf

# Shares of elements kept during the ramp, of which those above the final one are used: the paper's warm-up, an epoch
# each.
RAMP = (0.25, 0.0625, 0.015625, 0.004)


class DeepGradient:
    """A `topk` bucket with momentum correction, factor masking and a ramp.

    Momentum correction: what is accumulated and sent is the velocity u = m u + g of the worker instead of the gradient,
    so that an element which waits gathers momentum as it would have in dense training. The optimizer must then have
    none itself: use it with plain SGD. Factor masking: where an element is sent, the velocity starts anew from 0, lest
    stale momentum carry it on. Ramp: over `ramp_steps` exchanges the share of elements that are kept falls through
    `RAMP`.

    Args:
      spec: A `topk` exchange with `momentum` or `ramp_steps`.
      shapes: Static shapes of the tensors.
      group: All workers.
      seed: Not used by `topk`.
      name: Of the variables.
    """

    def __init__(self, spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str) -> None:
        assert spec.codec is not None
        codec = spec.codec
        self.shapes = list(shapes)
        self._sizes = [shape.num_elements() for shape in shapes]
        self._momentum = spec.momentum
        self._final: Bucket = Collective(spec, shapes, group, seed, name)
        self.elements, self.shard_elements = self._final.elements, self._final.shard_elements
        self.state = dict(self._final.state)
        keeps = [round(share * codec.block) for share in RAMP]
        stages = [
            dataclasses.replace(spec, codec=dataclasses.replace(codec, keep=keep))
            for keep in keeps
            if spec.ramp_steps and keep > codec.keep
        ]
        # All stages have the same blocks and shards, hence the same residuals.
        self._stages: list[Bucket] = [
            *(Collective(stage, shapes, group, seed, name, state=self._final.state) for stage in stages),
            self._final,
        ]
        self._stage_steps = max(1, spec.ramp_steps // max(1, len(stages)))
        self._start = spec.warmup_steps
        if self._momentum:
            self.state["velocity"] = buckets.worker_variable([self.elements], f"{name}_velocity")

    def sum(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, changes: Changes | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """See `buckets.Bucket`; the sums are of velocities if there is momentum."""
        assert changes is None  # what is sent decides about the velocity
        if not self._momentum:
            return self._stage_sum(tensors, step)
        velocity, residual = self.state["velocity"], self.state["worker"]
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
        moved = self._momentum * velocity.read_value() + flat
        wanted = moved + residual.read_value()
        parts = [tf.reshape(part, shape) for part, shape in zip(tf.split(moved, self._sizes), self.shapes, strict=True)]
        with tf.control_dependencies([wanted]):
            sums, norms = self._stage_sum(parts, step)
        with tf.control_dependencies([norms, *sums]):
            # What was not sent is all in the residual, to the last bit.
            velocity.assign(tf.where(residual.read_value() == wanted, moved, 0.0), read_value=False)
        return sums, norms

    def wire(self) -> Wire:
        """Bytes per exchange and worker after the ramp."""
        return self._final.wire()

    def _stage_sum(self, tensors: Sequence[tf.Tensor], step: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        if len(self._stages) == 1:
            return self._final.sum(tensors, step)
        stage = tf.clip_by_value((step - self._start) // self._stage_steps, 0, len(self._stages) - 1)
        flat = tf.switch_case(
            tf.cast(stage, tf.int32),
            [lambda bucket=bucket: _flatten(bucket.sum(tensors, step)) for bucket in self._stages],
        )
        return flat[:-1], flat[-1]


def _flatten(result: tuple[list[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
    return [*result[0], result[1]]

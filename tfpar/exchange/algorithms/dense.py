"""A bucket that `auto` sends dense. Functions run once per worker, on its first device."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange import buckets
from tfpar.exchange.buckets import Changes, Wire
from tfpar.exchange.spec import Spec

import tensorflow as tf


class Dense:
    """A bucket whose float32 sums TensorFlow's all-reduce makes.

    It delivers what the residual holds, which is nothing unless an earlier plan, with a codec, has left it.

    Args:
      spec: The exchange.
      shapes: Static shapes of the tensors.
      group: All workers.
      seed: Not used.
      name: Of the residual variable.
    """

    def __init__(self, spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str) -> None:
        self.shapes = list(shapes)
        self.elements = self.shard_elements = sum(shape.num_elements() for shape in shapes)
        self._group = group
        self._instance = allocate_instance_keys(1)[0]
        self.state = (
            {"worker": buckets.worker_variable([self.elements], f"{name}_worker")} if spec.error_feedback else {}
        )

    def sum(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, changes: Changes | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """See `buckets.Bucket`."""
        del step
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
        norm = 2.0 * tf.nn.l2_loss(flat)
        if self.state:
            flat += self.state["worker"].read_value()
            with tf.control_dependencies([flat]):
                buckets.change(self.state["worker"], tf.zeros([self.elements]), changes)
        parts = tf.split(self._group.all_reduce(flat, self._instance), [shape.num_elements() for shape in self.shapes])
        sums = [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return sums, tf.stack([norm, tf.zeros([])])

    def wire(self) -> Wire:
        """Bytes per exchange and worker."""
        payload = 4 * self.elements
        return Wire(payload, 2 * (self._group.size - 1) * payload // self._group.size)

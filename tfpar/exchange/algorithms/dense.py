"""`none`: the dense float32 all-reduce, as a bucket. Functions run once per worker, on its first device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.collectives import cost_model
from tfpar.collectives.cost_model import Cost, Link, Speed
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.exchange import buckets
from tfpar.exchange.buckets import PendingAssigns, WireBytes
from tfpar.exchange.options import Options
from tfpar.exchange.registry import DENSE, register

import tensorflow as tf


class DenseBucket:
    """A bucket whose float32 sums TensorFlow's all-reduce computes, as `auto` may choose.

    It also applies the residual, which is empty unless an earlier codec left one.

    Args:
      options: Whether there is a residual.
      shapes: Static shapes of the tensors.
      group: All workers.
      seed: Not used.
      name: Prefix of the residual variable's name.
    """

    factor_rank = 0

    def __init__(self, options: Options, shapes: Sequence[tf.TensorShape], group: Group, seed: int, name: str) -> None:
        del seed
        self.shapes = list(shapes)
        self.elements = self.shard_elements = sum(shape.num_elements() for shape in shapes)
        self._group = group
        self._instance = allocate_instance_keys(1, group)[0]
        self.state = buckets.residual_variables({"worker": self.elements}, name, error_feedback=options.error_feedback)

    def reduce(
        self, tensors: Sequence[tf.Tensor], step: tf.Tensor, pending: PendingAssigns | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums tensors over the workers; see `buckets.Bucket`."""
        del step
        flat = buckets.concatenated(tensors)
        norm = 2.0 * tf.nn.l2_loss(flat)
        if self.state:
            flat += self.state["worker"].read_value()
            with tf.control_dependencies([flat]):
                buckets.assign_or_defer(self.state["worker"], tf.zeros([self.elements]), pending)
        sums = buckets.split(self._group.all_reduce(flat, self._instance), self.shapes)
        return sums, tf.stack([norm, tf.zeros([])])

    def wire_bytes(self) -> WireBytes:
        """Bytes per exchange and worker."""
        payload = 4 * self.elements
        return WireBytes(payload, 2 * (self._group.size - 1) * payload // self._group.size)


def cost(options: Options, elements: int, workers: int, link: Link, speed: Speed) -> Cost:
    """The cost of an all-reduce; `speed` is that of copying."""
    del options
    return cost_model.all_reduce(4 * elements, workers, link, speed.decode)


def _candidates(common: Mapping[str, Any], group: Group) -> list[Options]:
    del group
    return [Options(**common)]


register(
    DENSE,
    Options,
    DenseBucket,
    cost=cost,
    candidates=_candidates,
    summary="dense float32 all-reduce",
    fixed={field.name: field.default for field in dataclasses.fields(Options) if field.init},
)

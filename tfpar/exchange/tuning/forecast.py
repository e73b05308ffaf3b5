"""Predicts the time of an exchange on the links and processors at hand, bucket by bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.collectives import cost_model
from tfpar.collectives.cost_model import Cost, Link, Speed
from tfpar.collectives.group import Group
from tfpar.exchange import fusion, registry
from tfpar.exchange import spec as specs
from tfpar.exchange.buckets import DENSE_BUCKET_BYTES
from tfpar.exchange.registry import Spec
from tfpar.exchange.tuning import measure
from tfpar.exchange.tuning.measure import Measured

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Sent:
    """Tensors that are sent together.

    Attributes:
      indices: Which tensors.
      elements: Their elements.
      spec: How they are summed.
    """

    indices: tuple[int, ...]
    elements: int
    spec: Spec


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A prediction.

    Attributes:
      sent: The buckets, in the order of the tensors.
      link: As measured.
      speeds: Speed of the codec of each bucket.
      copying: The speed of sums and copies of float32.
    """

    sent: list[Sent]
    link: Link
    speeds: list[Speed]
    copying: Speed

    def costs(self, workers: int) -> list[Cost]:
        """The cost of each bucket, among so many workers."""
        return [
            bucket.spec.cost(bucket.elements, workers, self.link, speed)
            for bucket, speed in zip(self.sent, self.speeds, strict=True)
        ]

    def cost(self, workers: int) -> Cost:
        """The cost of the whole exchange, of whose buckets several are under way at a time."""
        return cost_model.together(self.costs(workers))


def forecast(spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, device: str) -> Forecast:
    """Measures, and predicts an exchange; takes about a second. All workers of the group call it together.

    Args:
      spec: The exchange.
      shapes: Static shapes of the tensors.
      group: All workers, two or more.
      device: Where the exchange runs.
    """
    sent = buckets_of(spec, shapes)
    if spec.compresses:
        encoded = [bucket for bucket in sent if bucket.spec is spec]
        tuning = spec.algorithm.measured(spec, group, device)
        chosen = spec.algorithm.choose(spec, [bucket.elements for bucket in encoded], group, tuning).specs
        replaced = {bucket: dataclasses.replace(bucket, spec=one) for bucket, one in zip(encoded, chosen, strict=True)}
        sent = [replaced.get(bucket, bucket) for bucket in sent]
    codecs = list(dict.fromkeys(bucket.spec.options.codec for bucket in sent if bucket.spec.options.codec))
    measured: Measured = measure.measure(group, codecs, device)
    known = dict(zip(codecs, measured.speeds, strict=True))
    speeds = [known.get(bucket.spec.options.codec, measured.copying) for bucket in sent]
    return Forecast(sent, measured.link, speeds, measured.copying)


def buckets_of(spec: Spec, shapes: Sequence[tf.TensorShape]) -> list[Sent]:
    """The buckets of an exchange; with a codec, the first one has what travels dense with the sidecar."""
    sizes = [shape.num_elements() for shape in shapes]
    small: list[int] = []
    limit = DENSE_BUCKET_BYTES
    if spec.compresses:
        small = [index for index, shape in enumerate(shapes) if not spec.options.is_compressible(shape)]
        limit = spec.options.bucket_bytes
    others = [index for index in range(len(shapes)) if index not in set(small)]
    groups = [(small, specs.plain(registry.DENSE))]
    groups += [(indices, spec) for indices in fusion.group_indices(others, sizes, limit)]
    return [Sent(tuple(one), sum(sizes[index] for index in one), how) for one, how in groups if one]

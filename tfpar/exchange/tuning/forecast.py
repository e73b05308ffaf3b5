"""Predicts the time of an exchange on the links and processors at hand, bucket by bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpar.collectives import cost_model
from tfpar.collectives.cost_model import Cost, Link, Speed
from tfpar.collectives.group import Group
from tfpar.exchange import fusion, registry
from tfpar.exchange import spec as specs
from tfpar.exchange.buckets import DENSE_BUCKET_BYTES
from tfpar.exchange.registry import Spec
from tfpar.exchange.tuning import measure, rehearsal
from tfpar.exchange.tuning.measure import Measured

import tensorflow as tf

_ENOUGH = 0.1  # predicted seconds of a rehearsal
_TOO_LONG = 0.5  # which is repeated
_MOSTLY = 4.0  # times as much of one thing as of another


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
      workers: Workers of the rehearsal.
      factor: Its time over the predicted one; for other numbers of workers, which compete otherwise, it does not count.
    """

    sent: list[Sent]
    link: Link
    speeds: list[Speed]
    copying: Speed
    workers: int = 0
    factor: float = 1.0

    def costs(self, workers: int) -> list[Cost]:
        """The cost of each bucket, among so many workers."""
        costs = [
            bucket.spec.cost(bucket.elements, workers, self.link, speed)
            for bucket, speed in zip(self.sent, self.speeds, strict=True)
        ]
        return [cost.times(self.factor) for cost in costs] if workers == self.workers else costs

    def cost(self, workers: int) -> Cost:
        """The cost of the whole exchange, of whose buckets several are under way at a time."""
        return cost_model.together(self.costs(workers))


def forecast(spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, device: str) -> Forecast:
    """Measures, and predicts an exchange; takes a second or two. All workers of the group call it together.

    Args:
      spec: The exchange.
      shapes: Static shapes of the tensors.
      group: All workers, two or more.
      device: Where the exchange runs.
    """
    sent, tuning = buckets_of(spec, shapes), None
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
    found = Forecast(sent, measured.link, speeds, measured.copying)
    return _rehearsed(found, spec, shapes, group, device, tuning)


def _rehearsed(
    found: Forecast, spec: Spec, shapes: Sequence[tf.TensorShape], group: Group, device: str, tuning: Any
) -> Forecast:
    """The prediction, corrected by a rehearsal with the first buckets that take long enough to tell."""
    costs = found.costs(group.size)
    parts = [cost_model.together(costs[: count + 1]) for count in range(len(costs))]
    count = next((count for count, part in enumerate(parts, 1) if part.seconds >= _ENOUGH), len(parts))
    part = parts[count - 1]
    by_link = part.transfer > _MOSTLY * (part.compute + part.handling)  # of which the model knows everything
    if by_link or part.seconds > _TOO_LONG or "CPU" not in device.upper():
        return found
    indices = sorted(index for bucket in found.sent[:count] for index in bucket.indices)
    took = rehearsal.seconds_of(spec, [shapes[index] for index in indices], group, device, tuning)
    return dataclasses.replace(found, workers=group.size, factor=took / part.seconds)


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

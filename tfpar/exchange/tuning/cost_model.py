"""What an exchange costs: bytes and seconds of any codec and pattern, for any number of workers.

The usual model of messages (Hockney 1994): one of b bytes takes `latency + b / bandwidth`; a worker sends and receives
at the same time, and all of them at once. Encoding and decoding do not overlap with messages: within a bucket they do
not. That an exchange may overlap the backward pass does not count.
"""

from __future__ import annotations

import dataclasses

from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms import rounds as schedules
from tfpar.exchange.spec import Spec


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins a worker to the others.

    Attributes:
      latency: Seconds of a message without content.
      bandwidth: Bytes per second in each direction.
    """

    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """What one worker computes, in bytes of float32 gradient per second.

    Attributes:
      encode: Encoding with a residual.
      decode: Decoding and summing, of each payload.
    """

    encode: float
    decode: float


# float32 sums of a dense all-reduce, and copies into its buffer: about a memory copy.
DENSE = Speed(encode=8e9, decode=8e9)


@dataclasses.dataclass(frozen=True)
class Cost:
    """One exchange, as one worker sees it.

    Attributes:
      sent: Bytes it sends, framing of the transport left out.
      latency: Seconds of waiting for messages to begin.
      transfer: Seconds of the bytes on the link.
      compute: Seconds of encoding, decoding, summing.
    """

    sent: int
    latency: float
    transfer: float
    compute: float

    @property
    def seconds(self) -> float:
        """All together."""
        return self.latency + self.transfer + self.compute


def predict(spec: Spec, elements: int, workers: int, link: Link, speed: Speed | None = None) -> Cost:
    """The cost of exchanging one vector.

    Args:
      spec: Codec and pattern; of `powersgd`, the vector counts as one square matrix. `auto` has no cost of its own.
      elements: Float32 elements of the vector.
      workers: Number of workers N.
      link: What joins each of them to the others.
      speed: Of the codec; by default that of copying.
    """
    speed = speed or DENSE
    if workers == 1:
        return Cost(0, 0.0, 0.0, 0.0)
    gradient = 4 * elements
    if spec.rank:
        side = max(1, round(elements**0.5))
        factors = 2 * 4 * side * spec.rank
        cost = _all_reduce(factors, workers, link)
        # Each of three products and the residual reads the matrix once; two all-reduces wait twice.
        return dataclasses.replace(cost, latency=2 * cost.latency, compute=4 * gradient / speed.encode)
    if spec.codec is None:
        return _all_reduce(gradient, workers, link)
    if spec.pattern in specs.STAGED:
        return _staged(spec, elements, workers, link, speed)
    payload = spec.codec.payload_bytes(elements)
    if spec.pattern == "all_gather":
        compute = gradient / speed.encode + workers * gradient / speed.decode
        return _cost((workers - 1) * payload, workers - 1, link, compute)
    shard = -(-spec.codec.blocks(elements) // workers) * spec.codec.block
    sent = 2 * (workers - 1) * spec.codec.payload_bytes(shard)
    # Own gradient encoded; N payloads of a shard summed and encoded; all shards decoded.
    compute = gradient * (1 + 1 / workers) / speed.encode + gradient * 2 / speed.decode
    # The all-to-all sends all at once; the all-gather goes around in a ring.
    return _cost(sent, workers, link, compute)


def _all_reduce(size: int, workers: int, link: Link) -> Cost:
    """TensorFlow's ring."""
    share = (workers - 1) / workers
    return _cost(int(2 * share * size), 2 * (workers - 1), link, share * size / DENSE.decode + 2 * size / DENSE.encode)


def _staged(spec: Spec, elements: int, workers: int, link: Link, speed: Speed) -> Cost:
    assert spec.codec is not None
    schedule = schedules.SCHEDULES[spec.pattern](workers)
    shard = -(-spec.codec.blocks(elements) // schedule.shards) * spec.codec.block
    critical = schedule.critical_shards() * spec.codec.payload_bytes(shard)
    gradient = 4 * elements
    rounds = len(schedule.reduce) + len(schedule.gather)
    compute = gradient / speed.encode + 2 * gradient / speed.decode
    return _cost(critical, rounds, link, compute)


def _cost(sent: int, rounds: int, link: Link, compute: float) -> Cost:
    return Cost(sent, rounds * link.latency, sent / link.bandwidth, compute)

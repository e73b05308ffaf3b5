"""The cost of an exchange in bytes and seconds, for any number of workers. Each algorithm has its own cost function.

The usual model of messages (Hockney 1994): a message of b bytes takes `latency + b / bandwidth`; a worker sends and
receives at the same time, and all workers do so at once. A worker's processors encode, decode and sum, and also carry
bytes to the link. In an exchange of one piece they work before and after the bytes travel. In an exchange of P pieces,
chunks of a bucket or several buckets, one piece travels while the processors work on another: the time approaches that
of the slower of the two, and only the work on one piece remains exposed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Link:
    """The connection of a worker to the others.

    Attributes:
      latency: Seconds that an empty message takes.
      bandwidth: Bytes per second in each direction.
      handling: Seconds of the worker's processors for a byte that it sends, and one that it receives meanwhile.
      chunk_bytes: Bytes of the chunks in which the transport forms sums, see `Capabilities.chunk_bytes`; 0: a message
        is sent whole, and sums and gathered rows go around in a ring.
    """

    latency: float
    bandwidth: float
    handling: float = 0.0
    chunk_bytes: int = 0

    @property
    def is_direct(self) -> bool:
        """Whether a message goes straight to its receiver, so that members send to all others at once."""
        return self.chunk_bytes > 0

    def pieces(self, size: int) -> int:
        """Chunks of a message of `size` bytes that the transport sums or encodes one after the other."""
        return max(1, round(size / self.chunk_bytes)) if self.chunk_bytes else 1


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of one worker, in bytes of float32 gradient per second.

    Attributes:
      encode: Encoding with a residual.
      decode: Reading and summing, of each payload.
      write: Writing the sum.
    """

    encode: float
    decode: float
    write: float = math.inf

    def encoding(self, size: float) -> float:
        """Seconds to encode `size` bytes of gradient."""
        return size / self.encode

    def decoding(self, size: float, payloads: int = 1) -> float:
        """Seconds to decode payloads, each of `size` bytes of gradient, and to sum them."""
        return payloads * size / self.decode + size / self.write


# float32 sums of a dense all-reduce, and copies into its buffer: about a memory copy.
COPYING = Speed(encode=8e9, decode=8e9)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one exchange for one worker.

    Attributes:
      sent: Bytes it sends, without the framing of the transport.
      latency: Seconds of waiting for messages to begin.
      transfer: Seconds that the bytes take on the link.
      compute: Seconds of encoding, decoding, summing.
      handling: Seconds of the worker's processors for carrying the bytes, while they are on the link.
      pieces: Pieces that the exchange consists of. The processors work on one while another is on the link.
    """

    sent: int
    latency: float
    transfer: float
    compute: float
    handling: float = 0.0
    pieces: int = 1

    @property
    def seconds(self) -> float:
        """The total time."""
        serial = self.compute + max(self.transfer, self.handling)
        overlapped = max(self.transfer, self.compute + self.handling)
        return self.latency + overlapped + (serial - overlapped) / self.pieces

    def times(self, factor: float) -> Cost:
        """The cost where everything takes so many times as long."""
        latency, transfer, compute = (factor * each for each in (self.latency, self.transfer, self.compute))
        return Cost(self.sent, latency, transfer, compute, factor * self.handling, self.pieces)


NOTHING = Cost(0, 0.0, 0.0, 0.0)


def messages(sent: int, rounds: int, link: Link, compute: float, pieces: int = 1) -> Cost:
    """The cost of rounds of messages, one after the other.

    Args:
      sent: Bytes that a worker sends in all rounds.
      rounds: Number of rounds.
      link: The connection of a worker to the others.
      compute: Seconds of encoding, decoding, summing.
      pieces: Pieces that a message consists of, see `Cost`.
    """
    return Cost(sent, rounds * link.latency, sent / link.bandwidth, compute, sent * link.handling, pieces)


def all_reduce(size: int, workers: int, link: Link, copying: float = COPYING.decode) -> Cost:
    """The cost of a sum of `size` bytes of float32: TensorFlow's ring, or two messages straight to all others.

    Args:
      size: Bytes that each worker has.
      workers: Number of workers.
      link: The connection of each worker to the others.
      copying: Bytes per second that a worker copies or adds up.
    """
    share = (workers - 1) / workers
    # A ring's tensors are copied into a buffer and out of it; a direct transport sums most of them where they are.
    compute = (share * size + (0 if link.is_direct else 2 * size)) / copying
    rounds = 2 if link.is_direct else 2 * (workers - 1)
    return messages(int(2 * share * size), rounds, link, compute, link.pieces(size // workers))


def together(costs: Sequence[Cost]) -> Cost:
    """The cost of several buckets that are exchanged at a time: each is at least one piece of it."""
    if not costs:
        return NOTHING
    return Cost(
        sent=sum(cost.sent for cost in costs),
        latency=max(cost.latency for cost in costs),
        transfer=math.fsum(cost.transfer for cost in costs),
        compute=math.fsum(cost.compute for cost in costs),
        handling=math.fsum(cost.handling for cost in costs),
        pieces=sum(cost.pieces for cost in costs),
    )


def exposed_seconds(costs: Sequence[Cost], computing: Sequence[float]) -> float:
    """The time by which exchanges prolong a computation in parts, each of which completes gradients.

    The processors compute, encode and decode; the link carries what one part has completed while the next is computed.

    Args:
      costs: The cost of what is sent after each part, in the order of the parts; `NOTHING` for nothing.
      computing: Seconds of each part.
    """
    busy = free = arrived = 0.0  # the processors until, the link until, and the last message
    for cost, seconds in zip(costs, computing, strict=True):
        left = busy + seconds + cost.compute
        busy = left + cost.handling
        if cost.sent:
            # The first piece is sent once it is encoded, and the last one once all are.
            begins = max(left - cost.compute * (1.0 - 1.0 / cost.pieces), free)
            free = max(begins + cost.transfer, left + cost.transfer / cost.pieces)
            arrived = max(arrived, free + cost.latency)
    return max(busy, arrived) - math.fsum(computing)

"""The cost of an exchange in bytes and seconds, for any number of workers. Each algorithm has its own cost function.

The usual model of messages (Hockney 1994): a message of b bytes takes `latency + b / bandwidth`; a worker sends and
receives at the same time, and all workers do so at once. Encoding and decoding do not overlap with messages, as within
a bucket. The overlap of an exchange with the backward pass is not counted.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
    """The connection of a worker to the others.

    Attributes:
      latency: Seconds that an empty message takes.
      bandwidth: Bytes per second in each direction.
    """

    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of one worker, in bytes of float32 gradient per second.

    Attributes:
      encode: Encoding with a residual.
      decode: Decoding and summing, of each payload.
    """

    encode: float
    decode: float


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
    """

    sent: int
    latency: float
    transfer: float
    compute: float

    @property
    def seconds(self) -> float:
        """The total time."""
        return self.latency + self.transfer + self.compute


NOTHING = Cost(0, 0.0, 0.0, 0.0)


def messages(sent: int, rounds: int, link: Link, compute: float) -> Cost:
    """The cost of rounds of messages, one after the other.

    Args:
      sent: Bytes that a worker sends in all rounds.
      rounds: Number of rounds.
      link: The connection of a worker to the others.
      compute: Seconds of encoding, decoding, summing.
    """
    return Cost(sent, rounds * link.latency, sent / link.bandwidth, compute)


def all_reduce(size: int, workers: int, link: Link, copying: float = COPYING.decode) -> Cost:
    """The cost of TensorFlow's ring over `size` bytes of float32.

    Args:
      size: Bytes that each worker has.
      workers: Number of workers.
      link: The connection of each worker to the others.
      copying: Bytes per second that a worker copies or adds up.
    """
    share = (workers - 1) / workers
    compute = (share * size + 2 * size) / copying
    return messages(int(2 * share * size), 2 * (workers - 1), link, compute)

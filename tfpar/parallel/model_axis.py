"""The model axis of a mesh: devices that together hold one replica of the model.

Every device runs the same program on its own part of the weights (SPMD). Where a layer needs values of the other
devices, it calls one of the operators below, each with the gradient that tensor parallelism needs (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). `ModelAxis.on` sets the place of a program; outside of it, layers compute with whole
weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence

from tfpar.collectives.tensorflow import TensorFlowGroup, device_group
from tfpar.parallel.replica import static_replica_id

import tensorflow as tf

# TensorFlow's runtime keeps the shape of every call of a group until the process ends, so axes of the same devices
# continue one count of calls.
_instance_keys: dict[tuple[tuple[int, ...], int], Iterator[int]] = {}


class ModelAxis:
    """The devices of one worker, in groups that each hold a replica or one of its stages; or one part of such a group.

    Args:
      devices: For each program of the strategy, the names of its devices: one, or one for each stage of a pipeline.
        Programs of a replica are adjacent, and so are the workers that share a replica.
      worker: Rank of this worker.
      size: Programs of a replica.

    Attributes:
      size: The same.
      stages: Devices of a program.
      bytes_of_step: Bytes that a device sends to the others in a training step; 0 until the step is traced.
    """

    def __init__(self, devices: Sequence[Sequence[str]], worker: int, size: int) -> None:
        self.size, self.bytes_of_step = size, 0
        self.stages = stages = len(devices[0])
        self._places = [
            [
                _place(device_group(program // size * stages + stage, program % size, device, size), device)
                for stage, device in enumerate(row)
            ]
            for program, row in enumerate(devices, start=worker * len(devices))
        ]

    @property
    def programs(self) -> int:
        """Programs of this worker."""
        return len(self._places)

    @property
    def spans_workers(self) -> bool:
        """Whether a replica also has programs on other workers."""
        return self.programs < self.size

    def on(self, program: int, stage: int = 0) -> contextlib.AbstractContextManager[Place]:
        """Operations that this thread traces in this context belong to the program of one device.

        All devices must trace the same programs in the same order: the n-th collective of each is the same call.

        Args:
          program: Index of the program among those of this worker.
          stage: Index of the device among those of the program.
        """
        return at_place(self._places[program][stage])

    def sum_of_worker(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of one value per worker over all workers of the axis. Not for a replica context. No gradient."""
        sums = []
        for program in range(self.programs):
            with self.on(program) as place, tf.device(place.device):
                sums.append(place.sum(value if program == 0 else tf.zeros_like(value)))
        return sums[0]

    def on_own_device(self, stage: int = 0) -> contextlib.AbstractContextManager[Place]:
        """`on` for the current replica context."""
        return self.on(static_replica_id() % len(self._places), stage)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """One device on the axis, and the operators of its program.

    Attributes:
      group: The devices of the axis, seen from this one.
      device: Its name.
      sent: Bytes that the device sends in each call of its programs, in the order in which they were traced. Counts the
        least traffic possible: `2 (t - 1) / t` times a tensor that t devices sum, half of that if each gets a part of
        the sum, and t - 1 times a tensor that all devices get.
    """

    group: TensorFlowGroup
    device: str
    _instance_keys: Iterator[int]
    sent: list[int] = dataclasses.field(default_factory=list, repr=False)

    @property
    def rank(self) -> int:
        """Place of the device, from 0."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.group.size

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        """The sum of the devices' tensors, the same bits on each; in float32 for narrower types. No gradient."""
        summand = tf.cast(x, tf.float32) if x.dtype in (tf.bfloat16, tf.float16) else x
        self._count(summand, 2 * (self.size - 1) / self.size)
        return tf.cast(self.group.all_reduce(summand, next(self._instance_keys)), x.dtype)

    def collect(self, x: tf.Tensor) -> tf.Tensor:
        """The devices' tensors `[...]` in their order: `[size, ...]`. No gradient."""
        bits = x if x.dtype in self.group.capabilities.dtypes else tf.bitcast(x, tf.float16)  # bfloat16
        self._count(x, self.size - 1)
        rows = self.group.all_gather(bits[tf.newaxis], next(self._instance_keys))
        return rows if rows.dtype == x.dtype else tf.bitcast(rows, x.dtype)

    def concatenate(self, x: tf.Tensor) -> tf.Tensor:
        """The devices' tensors `[..., n]` side by side: `[..., size * n]`. No gradient."""
        return tf.concat(tf.unstack(self.collect(x)), axis=-1)

    def _count(self, x: tf.Tensor, times: float) -> None:
        elements = x.shape.num_elements()
        self.sent.append(0 if elements is None else round(times * elements * x.dtype.size))

    def all_gather(self, row: tf.Tensor) -> tf.Tensor:
        """The devices' tensors `[n]` as rows: `[size, n]`. No gradient."""
        return self.group.all_gather(row[tf.newaxis], next(self._instance_keys))

    def all_to_all(self, rows: tf.Tensor) -> tf.Tensor:
        """Sends row i of `[size, n]` to device i; row i of the result is from device i. No gradient."""
        return self.group.all_to_all(rows, next(self._instance_keys))

    def enter(self, x: tf.Tensor) -> tf.Tensor:
        """Before a layer whose outputs are divided: returns the tensor unchanged; its gradient is summed."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return tf.identity(x), self.sum

        return operator(x)

    def leave(self, x: tf.Tensor) -> tf.Tensor:
        """After a layer whose inputs are divided: returns the sum; its gradient passes unchanged."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self.sum(x), tf.identity

        return operator(x)

    def gather(self, x: tf.Tensor, padding: int = 0) -> tf.Tensor:
        """After a layer whose outputs `[..., n]` are divided: returns all; a device takes its part of the gradient.

        Args:
          x: The outputs.
          padding: How many of the last outputs are padding and are left out.
        """
        width = x.shape[-1]

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            start = self.rank * width
            outputs = self.concatenate(x)

            def backward(upstream: tf.Tensor) -> tf.Tensor:
                if padding:
                    upstream = tf.pad(upstream, [*[[0, 0]] * (upstream.shape.rank - 1), [0, padding]])
                return upstream[..., start : start + width]

            return outputs[..., : outputs.shape[-1] - padding] if padding else outputs, backward

        return operator(x)

    def enter_positions(self, x: tf.Tensor) -> tf.Tensor:
        """`enter` for divided positions `[m, T / size, ...]`: returns all; a device gets its part of the summed
        gradient."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._all_positions(x), self._sum_of_own_positions

        return operator(x)

    def leave_positions(self, x: tf.Tensor) -> tf.Tensor:
        """`leave` for divided positions: of `[m, T, ...]`, a device gets the sum at its positions; the gradient is
        gathered."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._sum_of_own_positions(x), self._all_positions

        return operator(x)

    def part_positions(self, x: tf.Tensor) -> tf.Tensor:
        """The positions of this device, of a tensor `[m, T, ...]` that all devices have; their gradient is gathered."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._own_positions(x), self._all_positions

        return operator(x)

    def gather_positions(self, x: tf.Tensor) -> tf.Tensor:
        """All positions, gathered from the devices; a device takes its part of the gradient, which all devices have."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._all_positions(x), self._own_positions

        return operator(x)

    def _all_positions(self, x: tf.Tensor) -> tf.Tensor:
        return tf.concat(tf.unstack(self.collect(x)), axis=1)

    def _own_positions(self, x: tf.Tensor) -> tf.Tensor:
        length = x.shape[1] // self.size
        return x[:, self.rank * length : (self.rank + 1) * length]

    def _sum_of_own_positions(self, x: tf.Tensor) -> tf.Tensor:
        """The sum of the devices' tensors at the positions of this device; in float32 for narrower types.

        TensorFlow 2.21 has no reduce-scatter on CPUs (`CollectiveReduceScatterV2`).
        """
        self._count(x, (self.size - 1) / self.size)
        bits = x if x.dtype in self.group.capabilities.dtypes else tf.bitcast(x, tf.float16)  # bfloat16
        rows = self.group.all_to_all(tf.stack(tf.split(bits, self.size, axis=1)), next(self._instance_keys))
        rows = tf.ensure_shape(rows, [self.size, x.shape[0], x.shape[1] // self.size, *x.shape[2:]])
        received = rows if rows.dtype == x.dtype else tf.bitcast(rows, x.dtype)
        narrow = x.dtype in (tf.bfloat16, tf.float16)
        return tf.cast(tf.reduce_sum(tf.cast(received, tf.float32) if narrow else received, axis=0), x.dtype)


@contextlib.contextmanager
def at_place(place: Place) -> Iterator[Place]:
    """Operations that this thread traces in this context belong to the program of a device."""
    before, _current.place = _current.place, place
    try:
        yield place
    finally:
        _current.place = before


def _place(group: TensorFlowGroup, device: str) -> Place:
    return Place(group, device, _instance_keys.setdefault((group.members, group.rank), itertools.count(1)))


class _Current(threading.local):
    """The place of the program that this thread traces: MirroredStrategy traces every device in a thread of its own."""

    def __init__(self) -> None:
        self.place: Place | None = None


_current = _Current()


def current_place() -> Place | None:
    """The device whose program is being traced; None where weights are whole."""
    return _current.place

"""The model axis of a mesh: devices that together hold one replica of the model.

Every device runs the same program on its own part of the weights (SPMD). If a layer needs values of the other devices,
it calls one of the operators below, each with the gradient that tensor parallelism needs (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). `ModelAxis.on` sets the place of a program; outside of it, layers compute with whole
weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

from tfpar.collectives.group import Capabilities, Group
from tfpar.collectives.tensorflow import device_group
from tfpar.parallel.division import Split
from tfpar.parallel.replica import static_replica_id

import tensorflow as tf


class _Calls(Iterator[int]):
    """Numbers the calls of one member of a group, from 1.

    Attributes:
      made: The last number.
    """

    def __init__(self) -> None:
        self.made = 0

    def __next__(self) -> int:
        self.made += 1
        return self.made


# TensorFlow's runtime keeps the shape of every call of a group until the process ends, so all axes with the same
# devices share one count of calls: for each group, by the ranks of its members.
_calls: dict[tuple[int, ...], dict[int, _Calls]] = {}


class Axis:
    """The devices of one worker, each in a group of devices that communicate within a step.

    Args:
      places: For each program of the strategy, its devices.
      size: Number of devices in a group.

    Attributes:
      size: Number of devices in a group.
    """

    def __init__(self, places: Sequence[Sequence[Place]], size: int) -> None:
        self.size, self._places = size, places

    @property
    def programs(self) -> int:
        """Number of programs of this worker."""
        return len(self._places)

    @property
    def spans_workers(self) -> bool:
        """Whether a group also has devices of other workers."""
        return self.programs < self.size

    def on(self, program: int, stage: int = 0) -> contextlib.AbstractContextManager[Place]:
        """Returns a context in which the operations that this thread traces belong to the program of one device.

        All devices must trace the same programs in the same order: the n-th collective of each is the same call.

        Args:
          program: Index of the program among those of this worker.
          stage: Index of the device among those of the program.
        """
        return at_place(self._places[program][stage])

    def on_own_device(self, stage: int = 0) -> contextlib.AbstractContextManager[Place]:
        """Calls `on` for the program of the current replica context."""
        return self.on(static_replica_id() % len(self._places), stage)

    def sum_of_worker(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of one value per worker over all workers of the first program's group. No gradient.

        Do not call it in a replica context.
        """
        sums = []
        for program in range(self.programs):
            with self.on(program) as place, tf.device(place.device):
                sums.append(place.sum(value if program == 0 else tf.zeros_like(value)))
        return sums[0]


class ModelAxis(Axis):
    """The devices of one worker, in groups that each hold a replica or one of its stages; or one part of such a group.

    Args:
      devices: For each program of the strategy, the names of its devices: one device, or one per stage of a pipeline.
        The programs of a replica are adjacent, and so are the workers that share a replica.
      worker: Rank of this worker.
      size: Number of programs of a replica.

    Attributes:
      stages: Number of devices of a program.
      bytes_of_step: Bytes that a device sends to the others in a training step; 0 until the step is traced.
    """

    def __init__(self, devices: Sequence[Sequence[str]], worker: int, size: int) -> None:
        self.bytes_of_step, self.stages = 0, len(devices[0])

        def place(program: int, stage: int, device: str) -> Place:
            first, replica = (program // size * self.stages + stage) * size, program // size * size
            workers = [each // len(devices) for each in range(replica, replica + size)]
            return place_of_group(range(first, first + size), first + program % size, device, workers)

        numbered = enumerate(devices, start=worker * len(devices))
        rows = [[place(program, stage, device) for stage, device in enumerate(row)] for program, row in numbered]
        super().__init__(rows, size)

    def on_no_device(self) -> contextlib.AbstractContextManager[Place]:
        """Returns a context for a trace that only finds shapes: layers compute with parts, and nothing is sent."""
        capabilities = self._places[0][0].group.capabilities
        return at_place(Place(_Unsent(self.size, capabilities), "", _Calls()))


@dataclasses.dataclass(frozen=True)
class _Unsent:
    """The first member of a group whose calls give tensors of the right shapes and send nothing.

    Attributes:
      size: Number of members.
      capabilities: Those of the group that it stands for.
    """

    size: int
    capabilities: Capabilities
    rank = 0

    def all_reduce(self, value: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group`."""
        del instance
        return value

    def all_to_all(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group`."""
        del instance
        return rows

    def reduce_scatter(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group`."""
        del instance
        return rows[: -(-rows.shape[0] // self.size)]

    def all_gather(self, row: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group`."""
        del instance
        return tf.repeat(row, self.size, axis=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """One device on the axis, and the operators of its program.

    Attributes:
      group: The collective group of the axis, from the view of this device.
      device: Name of this device.
      sent: Bytes that the device sends in each call of its programs, in the order in which they were traced. This is
        the minimum traffic: `2 (t - 1) / t` times a tensor that t devices sum, half of that if each device receives
        only a part of the sum, and t - 1 times a tensor that all devices receive.
    """

    group: Group | _Unsent
    device: str
    _instance_keys: Iterator[int]
    sent: list[int] = dataclasses.field(default_factory=list, repr=False)

    @property
    def rank(self) -> int:
        """Rank of the device on the axis, from 0."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.group.size

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the devices' tensors, the same bits on each; float32 for narrower dtypes. No gradient."""
        summand = tf.cast(x, tf.float32) if x.dtype in (tf.bfloat16, tf.float16) else x
        self._count(summand, 2 * (self.size - 1) / self.size)
        return tf.cast(self.group.all_reduce(summand, next(self._instance_keys)), x.dtype)

    def collect(self, x: tf.Tensor) -> tf.Tensor:
        """Stacks the devices' tensors `[...]` in the order of ranks: `[size, ...]`. No gradient."""
        bits = x if x.dtype in self.group.capabilities.dtypes else tf.bitcast(x, tf.float16)  # bfloat16
        self._count(x, self.size - 1)
        rows = self.group.all_gather(bits[tf.newaxis], next(self._instance_keys))
        return rows if rows.dtype == x.dtype else tf.bitcast(rows, x.dtype)

    def concatenate(self, x: tf.Tensor) -> tf.Tensor:
        """Concatenates the devices' tensors `[..., n]` to `[..., size * n]`. No gradient."""
        return tf.concat(tf.unstack(self.collect(x)), axis=-1)

    def _count(self, x: tf.Tensor, times: float) -> None:
        elements = x.shape.num_elements()
        self.sent.append(0 if elements is None else round(times * elements * x.dtype.size))

    def all_gather(self, row: tf.Tensor) -> tf.Tensor:
        """Returns the devices' tensors `[n, ...]` as rows: `[size, n, ...]`. No gradient."""
        self._count(row, self.size - 1)
        return self.group.all_gather(row[tf.newaxis], next(self._instance_keys))

    def share_of_sum(self, x: tf.Tensor) -> tf.Tensor:
        """Returns this device's share of the sum of the devices' tensors, see `Group.reduce_scatter`. No gradient."""
        self._count(x, (self.size - 1) / self.size)
        return self.group.reduce_scatter(x, next(self._instance_keys))

    def swap(self, rows: tf.Tensor) -> tf.Tensor:
        """Sends row k `[size, n]` to device k; returns the rows from all devices, `[size, n]`. No gradient."""
        self._count(rows, (self.size - 1) / self.size)
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
          padding: Number of outputs at the end that are padding and are dropped.
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

    def join(self, x: tf.Tensor, split: Split) -> tf.Tensor:
        """Returns the whole of what is divided; each device takes its part of the gradient, which all devices have."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            whole = split.joined_tensor(tf.unstack(self.collect(x)))
            return whole, lambda upstream: split.part_tensors(upstream)[self.rank]

        return operator(x)

    def enter_positions(self, x: tf.Tensor) -> tf.Tensor:
        """`enter` for divided positions `[m, T / size, ...]`.

        Returns all positions; in the backward pass, a device receives its part of the summed gradient.
        """

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._all_positions(x), self._sum_of_own_positions

        return operator(x)

    def leave_positions(self, x: tf.Tensor) -> tf.Tensor:
        """`leave` for divided positions: of `[m, T, ...]`, a device receives the sum at its positions.

        The gradient is gathered.
        """

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._sum_of_own_positions(x), self._all_positions

        return operator(x)

    def part_positions(self, x: tf.Tensor) -> tf.Tensor:
        """Returns this device's positions of a tensor `[m, T, ...]` that all devices have; gathers the gradient."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self._own_positions(x), self._all_positions

        return operator(x)

    def gather_positions(self, x: tf.Tensor) -> tf.Tensor:
        """Returns all positions, gathered; each device takes its part of the gradient, which all devices have."""

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
        """Returns the sum of the devices' tensors at the positions of this device; in float32 for narrower dtypes."""
        self._count(x, (self.size - 1) / self.size)
        shape, narrow = [x.shape[0], x.shape[1] // self.size, *x.shape[2:]], x.dtype in (tf.bfloat16, tf.float16)
        bits = x if x.dtype in self.group.capabilities.dtypes else tf.bitcast(x, tf.float16)  # bfloat16
        rows = tf.stack(tf.split(bits, self.size, axis=1))
        if not narrow:
            return tf.ensure_shape(self.group.reduce_scatter(rows, next(self._instance_keys))[0], shape)
        rows = tf.ensure_shape(self.group.all_to_all(rows, next(self._instance_keys)), [self.size, *shape])
        received = rows if rows.dtype == x.dtype else tf.bitcast(rows, x.dtype)
        return tf.cast(tf.reduce_sum(tf.cast(received, tf.float32), axis=0), x.dtype)


@contextlib.contextmanager
def at_no_place() -> Iterator[None]:
    """Returns a context in which this thread traces layers with whole weights, as outside of an axis."""
    before, _current.place = _current.place, None
    try:
        yield
    finally:
        _current.place = before


@contextlib.contextmanager
def at_place(place: Place) -> Iterator[Place]:
    """Returns a context in which the operations that this thread traces belong to the program of a device."""
    before = _current.place, _current.graph
    _current.place, _current.graph = place, tf.compat.v1.get_default_graph()
    try:
        yield place
    finally:
        _current.place, _current.graph = before


def place_of_group(members: Sequence[int], number: int, device: str, workers: Sequence[int]) -> Place:
    """Returns the place of a device in a group, see `device_group`. Call it for no group whose calls are being traced.

    If an error ended an earlier trace, only some of this worker's members had traced their calls. From now on the next
    call of each has the same number again; otherwise they would wait for each other forever.
    """
    group = device_group(members, number, device, workers)
    of_members = _calls.setdefault(group.members, {})
    calls = of_members.setdefault(group.rank, _Calls())
    made = max(each.made for each in of_members.values())
    for each in of_members.values():
        each.made = made
    return Place(group, device, calls)


class _Current(threading.local):
    """The place of the program that this thread traces, and the graph of that: MirroredStrategy traces every device in
    its own thread."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.graph: tf.Graph | None = None


_current = _Current()


def current_place() -> Place | None:
    """Returns the place of the program that is being traced; None where weights are whole."""
    return _current.place


def graph_of_program() -> tf.Graph | None:
    """Returns the graph in which the program of `current_place` begins; None where weights are whole."""
    return _current.graph if _current.place else None

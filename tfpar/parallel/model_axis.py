"""The model axis of a mesh: devices that hold one replica of the model between them.

Every device runs the same program on its own part of the weights (SPMD). Where a layer needs what the others have, it
calls one of the operators below, each with the gradient that tensor parallelism needs (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). A program finds its place by `ModelAxis.on`; elsewhere layers compute with whole weights.
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

# The runtime remembers the shape of every call of a group while the process lives: axes of the same devices count on.
_instance_keys: dict[tuple[tuple[int, ...], int], Iterator[int]] = {}


class ModelAxis:
    """The devices of one worker, in groups that each hold a replica, or a stage of one; or one part of such a group.

    Args:
      devices: For each program of the strategy, the names of its devices: one, or one for each stage of a pipeline.
        Programs of a replica lie side by side, and so do those of the workers that hold one between them.
      worker: Rank of this worker.
      size: Programs of a replica.

    Attributes:
      size: The same.
      stages: Devices of a program.
    """

    def __init__(self, devices: Sequence[Sequence[str]], worker: int, size: int) -> None:
        self.size = size
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
        """Whether a replica has programs on other workers, too."""
        return self.programs < self.size

    @contextlib.contextmanager
    def on(self, program: int, stage: int = 0) -> Iterator[Place]:
        """What is traced in this context, in this thread, is the program of one device.

        All devices must trace the same programs in the same order: the n-th collective of each is the same call.

        Args:
          program: Of which program it is, among those of this worker.
          stage: On which of its devices.
        """
        before, _current.place = _current.place, self._places[program][stage]
        try:
            yield self._places[program][stage]
        finally:
            _current.place = before

    def on_own_device(self, stage: int = 0) -> contextlib.AbstractContextManager[Place]:
        """`on` for the replica context that is open."""
        return self.on(static_replica_id() % len(self._places), stage)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """One device on the axis, and the operators of its program.

    Attributes:
      group: The devices of the axis, seen from this one.
      device: Its name.
    """

    group: TensorFlowGroup
    device: str
    _instance_keys: Iterator[int]

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
        narrow = x.dtype in (tf.bfloat16, tf.float16)
        total = self.group.all_reduce(tf.cast(x, tf.float32) if narrow else x, next(self._instance_keys))
        return tf.cast(total, x.dtype)

    def concatenate(self, x: tf.Tensor) -> tf.Tensor:
        """The devices' tensors `[..., n]` side by side: `[..., size * n]`. No gradient."""
        bits = x if x.dtype in self.group.capabilities.dtypes else tf.bitcast(x, tf.float16)  # bfloat16
        rows = self.group.all_gather(bits[tf.newaxis], next(self._instance_keys))
        return tf.concat([tf.bitcast(row, x.dtype) for row in tf.unstack(rows)], axis=-1)

    def enter(self, x: tf.Tensor) -> tf.Tensor:
        """In front of a layer whose outputs are divided: the tensor; its gradient is summed."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return tf.identity(x), self.sum

        return operator(x)

    def leave(self, x: tf.Tensor) -> tf.Tensor:
        """Behind a layer whose inputs are divided: the sum; its gradient passes as it is."""

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return self.sum(x), tf.identity

        return operator(x)

    def gather(self, x: tf.Tensor) -> tf.Tensor:
        """Behind a layer whose outputs `[..., n]` are divided: all of them; a device takes its part of the gradient."""
        width = x.shape[-1]

        @tf.custom_gradient
        def operator(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            start = self.rank * width
            return self.concatenate(x), lambda upstream: upstream[..., start : start + width]

        return operator(x)


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

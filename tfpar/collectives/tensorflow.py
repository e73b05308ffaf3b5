"""`TensorFlowGroup`: groups over the collectives of TensorFlow's runtime, NCCL on GPUs where it works, else gRPC.

`new_group` and `world_group` make groups of any transport.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Protocol

from tfpar.collectives import message_types
from tfpar.collectives.group import Capabilities, Group, channel_key, group_key, message_key
from tfpar.process.exit_codes import SHARED_GPUS
from tfpar_ops.codecs import GPU_PEERS

import tensorflow as tf
from tensorflow.python.framework import kernels

# Keywords of a variable that is the state of one worker, not of the model: strategies must not mirror or combine it.
PER_WORKER = {
    "synchronization": tf.VariableSynchronization.ON_READ,
    "aggregation": tf.VariableAggregation.NONE,
}

# Numbers of devices in groups, above all ranks of workers.
_FIRST_DEVICE = 1 << 40
_FIRST_OF_PLACE = 1 << 41

# Types that all operations below accept (TensorFlow 2.21). Other types are sent as int32 words (`tf.bitcast`).
_DTYPES = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})


def is_gpu(device: str) -> bool:
    """Whether a device, by its name, is a GPU."""
    return "GPU" in device


def count_gpus() -> int:
    """The GPUs of this machine; one that was split into logical devices counts as so many."""
    return sum(map(_logical_devices, tf.config.list_physical_devices("GPU")))


def has_nccl() -> bool:
    """Whether NCCL works between the GPUs of this machine.

    Builds of TensorFlow without GPUs do not have it, and it takes each GPU once: not the logical devices of one, nor
    for several workers that share one.
    """
    if os.environ.get(SHARED_GPUS):
        return False
    return _has_nccl_kernels() and all(_logical_devices(gpu) == 1 for gpu in tf.config.list_physical_devices("GPU"))


@functools.cache
def _has_nccl_kernels() -> bool:
    return any(kernel.device_type == "GPU" for kernel in kernels.get_registered_kernels_for_op("NcclAllReduce").kernel)


def _logical_devices(gpu: tf.config.PhysicalDevice) -> int:
    return max(1, len(tf.config.get_logical_device_configuration(gpu) or ()))


@dataclasses.dataclass(frozen=True)
class TensorFlowGroup:
    """A `Group` over `tf.raw_ops.Collective*`. Make one with `new_group` or `world_group`.

    A multi-worker strategy must have connected the workers before the first call.

    Attributes:
      members: Ranks of the members among all workers, ascending. The runtime sorts members by their tasks (2.21,
        `DeviceNameUtils::CompareFullNames`), in which order tfpar counts ranks.
      rank: Place of this worker among the members.
      on_gpus: Whether the members are GPUs.
      all_workers: Whether the members are all workers, whose messages have exact keys (`message_key`).
    """

    members: tuple[int, ...]
    rank: int
    on_gpus: bool = False
    all_workers: bool = False

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def key(self) -> int:
        """The group key of its collectives."""
        return group_key(self.members, self._device_type)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the group, which depend on the devices alone."""
        return Capabilities(
            ordered=self._uses_nccl,
            largest_fan_in=GPU_PEERS if self.on_gpus else None,
            dtypes=_DTYPES,
            messages=True,
            variable_sizes=not self._uses_nccl,
        )

    def all_reduce(self, value: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group.all_reduce`."""
        if self.size == 1:
            return tf.identity(value)
        reduced = tf.raw_ops.CollectiveReduceV2(
            input=value,
            group_size=self.size,
            group_key=self.key,
            instance_key=instance,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint=self._hint,
        )
        return run_unordered(reduced)

    def all_to_all(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group.all_to_all`."""
        if self.size == 1:
            return tf.identity(rows)
        received = tf.raw_ops.CollectiveAllToAllV2(
            input=rows,
            group_size=self.size,
            group_key=self.key,
            instance_key=instance,
            ordering_token=[],
            communication_hint=self._hint,
        )
        return run_unordered(received)

    def reduce_scatter(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group.reduce_scatter`. TensorFlow 2.21 has none on CPUs (`CollectiveReduceScatterV2`)."""
        share = -(-rows.shape[0] // self.size)
        if missing := self.size * share - rows.shape[0]:
            rows = tf.pad(rows, [[0, missing], *[[0, 0]] * (rows.shape.rank - 1)])
        shares = tf.reshape(rows, [self.size, share, *rows.shape[1:]])
        return tf.add_n(tf.unstack(self.all_to_all(shares, instance)))

    def all_gather(self, row: tf.Tensor, instance: int | tf.Tensor) -> tf.Tensor:
        """See `Group.all_gather`."""
        if self.size == 1:
            return tf.identity(row)
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=row,
            group_size=self.size,
            group_key=self.key,
            instance_key=instance,
            ordering_token=[],
            communication_hint=self._hint,
        )
        return tf.ensure_shape(run_unordered(gathered), [self.size, *row.shape[1:]])

    def send(self, value: tf.Tensor, target: int, instance: int) -> tf.Tensor:
        """See `Group.send`. Functions drop unused sends in TensorFlow 2.21 too (`ASYNC_STATEFUL_OPS`)."""
        return tf.raw_ops.CollectiveBcastSendV2(
            input=value,
            group_size=2,
            group_key=self._message_key(target),
            instance_key=instance,
            communication_hint="auto",
        )

    def receive(self, shape: tf.TensorShape, dtype: tf.DType, source: int, instance: int) -> tf.Tensor:
        """See `Group.receive`."""
        received = tf.raw_ops.CollectiveBcastRecvV2(
            group_size=2,
            group_key=self._message_key(source),
            instance_key=instance,
            shape=tf.constant(shape.as_list(), tf.int32),
            T=dtype,
            communication_hint="auto",
        )
        return tf.ensure_shape(received, shape)

    @property
    def _hint(self) -> str:
        """TensorFlow 2.21 uses NCCL only if the hint says so (`AssignCollectiveType`), otherwise gRPC for GPUs too."""
        return "nccl" if self._uses_nccl else "auto"

    @property
    def _uses_nccl(self) -> bool:
        return self.on_gpus and has_nccl()

    @property
    def _device_type(self) -> str:
        return "GPU" if self.on_gpus else "CPU"

    def _message_key(self, other: int) -> int:
        pair = self.members[self.rank], self.members[other]
        return message_key(self.members, *pair, self._device_type, all_workers=self.all_workers)


class MakeGroup(Protocol):
    """Makes a group of several devices over another transport."""

    def __call__(
        self, members: tuple[int, ...], rank: int, workers: tuple[int, ...], *, all_workers: bool, on_gpus: bool
    ) -> Group:
        """Makes it.

        Args:
          members: See `Group.members`.
          rank: See `Group.rank`.
          workers: Ranks of the workers that the members belong to.
          all_workers: Whether the members are all workers.
          on_gpus: Whether they are GPUs.
        """


_make_group: MakeGroup | None = None
_makes_gpu_groups = False


def use_transport(make: MakeGroup | None, *, for_gpus: bool = False) -> None:
    """Replaces the transport of groups that are created from now on.

    Args:
      make: Creates them; None: TensorFlow's transport is used again.
      for_gpus: Whether it creates groups of GPUs as well; otherwise they keep TensorFlow's transport.
    """
    global _make_group, _makes_gpu_groups
    _make_group, _makes_gpu_groups = make, for_gpus


def transport_of(device: str) -> MakeGroup | None:
    """The function that creates groups of such devices in place of TensorFlow's transport; see `use_transport`."""
    return _make_group if _makes_gpu_groups or not is_gpu(device) else None


def _group(
    members: tuple[int, ...], rank: int, workers: tuple[int, ...], device: str, *, all_workers: bool = False
) -> Group:
    make = transport_of(device)
    if make is not None and len(members) > 1:
        return make(members, rank, workers, all_workers=all_workers, on_gpus=is_gpu(device))
    return TensorFlowGroup(members, rank, is_gpu(device), all_workers)


def new_group(members: Sequence[int], worker: int, device: str = "") -> Group:
    """The group of some workers. Only its members need to call this, in any order, and nothing is sent.

    Args:
      members: Ranks of the members among all workers, in any order.
      worker: Rank of this worker among all workers.
      device: Device of this worker that takes part; the other members' must be of the same type. By default a CPU.

    Raises:
      ValueError: A negative or repeated rank; or this worker is not a member.
    """
    ranks = tuple(sorted(members))
    if not ranks or ranks[0] < 0 or len(set(ranks)) < len(ranks):
        raise ValueError(f"members={list(members)}: a group needs at least one rank, none negative or repeated")
    if worker not in ranks:
        raise ValueError(f"worker={worker} is not a rank among members={list(members)}")
    return _group(ranks, ranks.index(worker), ranks, device)


def world_group(workers: int = 1, worker: int = 0, device: str = "") -> Group:
    """The group of all workers.

    Args:
      workers: Number of workers.
      worker: Rank of this one.
      device: See `new_group`.
    """
    if not 0 <= worker < workers:
        raise ValueError(f"worker={worker} is not a rank among workers={workers}")
    ranks = tuple(range(workers))
    return _group(ranks, worker, ranks, device, all_workers=True)


def device_group(members: Sequence[int], number: int, device: str, workers: Sequence[int]) -> Group:
    """The group of some devices, of one worker or more. Each of its calls runs on the device it belongs to.

    Args:
      members: Numbers of the devices, ascending; not the same for two groups of devices.
      number: Number of the device it belongs to.
      device: Its name.
      workers: For each member, the rank of its worker.
    """
    ranks, rank = tuple(_FIRST_DEVICE + member for member in members), members.index(number)
    if len(set(workers)) == len(members):
        return _group(ranks, rank, tuple(workers), device)
    return TensorFlowGroup(ranks, rank, is_gpu(device))


def group_of_place(number: int, workers: Group, device: str) -> Group:
    """The group of the devices that have the same place in a replica of each worker. Its calls run on this worker's.

    Args:
      number: Number of the devices in their replicas; not the same for other devices or another group of workers.
      workers: Group of the workers.
      device: Name of this worker's device.
    """
    first = _FIRST_OF_PLACE + number * workers.size
    return _group(tuple(range(first, first + workers.size)), workers.rank, workers.members, device)


@dataclasses.dataclass(frozen=True)
class Channel:
    """Messages from one worker to another. Both must use the same device for all of one channel's.

    Attributes:
      source: Rank of the sender among all workers.
      target: Rank of the receiver.
      device: The device of this worker.
    """

    source: int
    target: int
    device: str = ""

    @property
    def waits_apart(self) -> bool:
        """Whether no thread of TensorFlow waits for a message, so that any number of them may be received early."""
        return transport_of(self.device) is not None

    def send(self, value: tf.Tensor, instance: int) -> tf.Tensor:
        """Sends a tensor; see `Group.send`."""
        if self.waits_apart:
            pair = self._pair(self.source)
            return pair.send(value, 1 - pair.rank, instance)
        sent = tf.raw_ops.CollectiveBcastSendV2(
            input=message_types.as_sent(value),
            group_size=2,
            group_key=channel_key(self.source, self.target),
            instance_key=instance,
            communication_hint="auto",
        )
        # Otherwise TensorFlow 2.21 prunes a message that nothing on this worker waits for, and the other worker hangs.
        return run_unordered(sent)

    def receive(self, spec: tf.TensorSpec, instance: int) -> tf.Tensor:
        """Receives a tensor of a known shape and type; see `Group.receive`."""
        if self.waits_apart:
            pair = self._pair(self.target)
            return pair.receive(spec.shape, spec.dtype, 1 - pair.rank, instance)
        sent = message_types.sent_spec(spec)
        received = tf.raw_ops.CollectiveBcastRecvV2(
            group_size=2,
            group_key=channel_key(self.source, self.target),
            instance_key=instance,
            shape=tf.constant(sent.shape.as_list(), tf.int32),
            T=sent.dtype,
            communication_hint="auto",
        )
        received = run_unordered(received)  # see `send`
        return tf.ensure_shape(message_types.as_received(received, spec.dtype), spec.shape)

    def _pair(self, worker: int) -> Group:
        ranks = min(self.source, self.target), max(self.source, self.target)
        return _group(ranks, ranks.index(worker), ranks, self.device)


def run_unordered(value: tf.Tensor) -> tf.Tensor:
    """Lets a collective, or a clock, run concurrently with the others of its function.

    TensorFlow 2.21 runs stateful operations of a function in the order in which they were traced, these among them
    (`auto_control_deps.py`): buckets would be sent one after the other, and the link would be idle while a bucket is
    encoded. On gRPC, keys alone distinguish calls. NCCL needs the same order on every worker, which this keeps.
    (Messages between two workers have no such order; they use gRPC, on GPUs too.)
    """
    if tf.is_symbolic_tensor(value) and not is_gpu(value.device):
        manager = value.graph.experimental_acd_manager
        if manager is not None:
            manager.run_independently(value.op)
    return value


def local_copy(variable: tf.Variable) -> tf.Variable:
    """This worker's copy, on its first device, of a `PER_WORKER` variable; itself if made under no strategy."""
    return tf.distribute.get_strategy().experimental_local_results(variable)[0]

"""Collective calls of TensorFlow's runtime among workers, and the keys that tell them apart.

A call needs a group key, one per set of members, and an instance key, one per call site: the same on all members, and
used for nothing else while the program lives. TensorFlow's strategies count theirs from small numbers (2.21:
`CollectiveKeys`, group and instance keys from 1 and 100); ours start far above.

The runtime takes members in the order of their tasks, so the rank in a group of all workers is the task's index.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading

import tensorflow as tf

_FIRST_KEY = 1 << 20

# Keywords of a variable that is the state of one worker, not of the model: no strategy is to mirror or combine it.
LOCAL = {
    "synchronization": tf.VariableSynchronization.ON_READ,
    "aggregation": tf.VariableAggregation.NONE,
}

_lock = threading.Lock()
_instances = itertools.count(_FIRST_KEY)


@dataclasses.dataclass(frozen=True)
class Group:
    """Workers that exchange something.

    Attributes:
      size: Number of members.
      rank: This worker's place among them.
      key: Group key.
      gpus: Whether the members are GPUs, whose collectives NCCL carries out; the runtime's own do otherwise.
    """

    size: int
    rank: int
    key: int
    gpus: bool = False

    @classmethod
    def of_workers(cls, workers: int, worker: int, device: str = "") -> Group:
        """The group of all workers of a cluster; on GPUs if the device of this one is a GPU."""
        return cls(workers, worker, _FIRST_KEY, "GPU" in device)

    @property
    def _hint(self) -> str:
        """TensorFlow 2.21 takes NCCL only where it is asked for (`AssignCollectiveType`), else gRPC for GPUs too."""
        return "nccl" if self.gpus else "auto"

    def all_reduce(self, value: tf.Tensor, instance: int) -> tf.Tensor:
        """Sum over the members, the same bits on each. Float32 of any static shape."""
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
        return independent(reduced)

    def all_to_all(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """Row i goes to member i; row i of the result came from member i. `[size, ...]`, any type but uint8."""
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
        return independent(received)

    def all_gather(self, row: tf.Tensor, instance: int) -> tf.Tensor:
        """The members' rows in the order of their ranks: `[1, ...]` to `[size, ...]`."""
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
        return tf.ensure_shape(independent(gathered), [self.size, *row.shape[1:]])

    def send(self, value: tf.Tensor, target: int, instance: int) -> tf.Tensor:
        """Sends to one member, who calls `receive` with the same instance key.

        Returns:
          A tensor on which something that is used must depend: functions leave out sends whose result nobody wants
          (TensorFlow 2.21, `ASYNC_STATEFUL_OPS`), and the receiver would wait for ever.
        """
        return tf.raw_ops.CollectiveBcastSendV2(
            input=value,
            group_size=2,
            group_key=_pair_key(self.rank, target),
            instance_key=instance,
            communication_hint="auto",
        )

    def receive(self, shape: tf.TensorShape, dtype: tf.DType, source: int, instance: int) -> tf.Tensor:
        """What member `source` sends with this instance key, of a static shape."""
        received = tf.raw_ops.CollectiveBcastRecvV2(
            group_size=2,
            group_key=_pair_key(self.rank, source),
            instance_key=instance,
            shape=tf.constant(shape.as_list(), tf.int32),
            T=dtype,
            communication_hint="auto",
        )
        return tf.ensure_shape(received, shape)


def new_instances(count: int) -> list[int]:
    """Instance keys that no other call site has. All workers must ask for the same in the same order."""
    with _lock:
        return [next(_instances) for _ in range(count)]


def independent(value: tf.Tensor) -> tf.Tensor:
    """Lets a collective, or a clock, run beside the others of its function.

    TensorFlow 2.21 runs stateful operations of a function in the order in which they were traced, these among them
    (`auto_control_deps.py`): buckets would go one after the other, and a link be idle while a bucket is encoded. On
    gRPC keys alone tell calls apart. NCCL needs the same order on every worker, which this keeps. (Messages between two
    workers are in no such order; they go through gRPC, on GPUs too.)
    """
    if tf.is_symbolic_tensor(value) and "GPU" not in value.device:
        manager = value.graph.experimental_acd_manager
        if manager is not None:
            manager.run_independently(value.op)
    return value


def _pair_key(one: int, other: int) -> int:
    """Group key of two members: a number of its own for each pair, whoever asks, in whatever order."""
    low, high = min(one, other), max(one, other)
    return _FIRST_KEY + 1 + high * (high - 1) // 2 + low


def local(variable: tf.Variable) -> tf.Variable:
    """This worker's copy, on its first device, of a variable made with `LOCAL`; itself if made under no strategy."""
    return tf.distribute.get_strategy().experimental_local_results(variable)[0]

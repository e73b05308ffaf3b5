"""`Group`, some ranks that exchange tensors, and the keys that distinguish groups and their calls.

A transport needs a *group key*, one per set of members, and an *instance key*, one per call site. All members must use
the same keys, and no two call sites of a group may share one while the process lives. Every key comes from this module:
group keys are a pure function of the members, instance keys are counted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from tfpar_ops import Codec

import tensorflow as tf

# TensorFlow 2.21's strategies count theirs from 1 (groups) and from 100 (instances), see `CollectiveKeys`.
_FIRST_KEY = 1 << 20
_FIRST_WORLD_MESSAGE_KEY = 1 << 27  # above the keys of pairs
_FIRST_HASHED_KEY = 1 << 28  # above both
_END_OF_KEYS = 1 << 31  # keys are int32
_DEVICE_TYPES = ("CPU", "GPU")

# Instance keys that every group reserves for messages between the hosts' Python code (`tfpar.collectives.agreement`).
HOST_MESSAGE_KEYS = range(_FIRST_KEY, _FIRST_KEY + 96)
_FIRST_SUBGROUP_INSTANCE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The capabilities of a group's transport and devices.

    Attributes:
      ordered: Whether members must start the group's calls in the same order (NCCL). Otherwise keys alone distinguish
        calls, and calls may overlap.
      largest_fan_in: Encoded payloads that a member's device can add up in one operation; None: any number.
      dtypes: Data types that every operation takes.
      messages: Whether `send` and `receive` work.
      variable_sizes: Whether a function may choose at run time among calls of different sizes, each with an instance
        key of its own, as rows of embeddings need.
      chunk_bytes: Bytes of the chunks in which sums, and encoded exchanges (`Pipelined`), are formed, while other
        chunks travel. 0: whole messages, and sums that go around in a ring.
    """

    ordered: bool
    largest_fan_in: int | None
    dtypes: frozenset[tf.DType]
    messages: bool
    variable_sizes: bool
    chunk_bytes: int = 0


class Group(Protocol):
    """Some ranks that exchange tensors. Any subset of the workers can be a group.

    Every member makes the same calls with the same instance keys. The size of a call site's tensors does not change.
    With a single member, collectives return their input.
    """

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the members among all workers, ascending."""

    @property
    def rank(self) -> int:
        """Place of this worker among the members, from 0."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the group."""

    def all_reduce(self, value: tf.Tensor, instance: int) -> tf.Tensor:
        """Sum over the members, the same bits on each.

        Args:
          value: Of any static shape, the same on all members.
          instance: Instance key.
        """

    def all_to_all(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """Sends row i to member i; row i of the result came from member i.

        Args:
          rows: `[size, ...]`.
          instance: Instance key.
        """

    def reduce_scatter(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """Sum over the members, in the order of their ranks, of which this member receives its share of the rows:
        `[n, ...]` to `[ceil(n / size), ...]`. Zeros fill the shares that exceed the n rows.

        Args:
          rows: Of a type that can be summed, of any static shape, the same on all members.
          instance: Instance key.
        """

    def all_gather(self, row: tf.Tensor, instance: int | tf.Tensor) -> tf.Tensor:
        """The members' rows in the order of their ranks: `[1, ...]` to `[size, ...]`.

        Args:
          row: `[1, ...]`.
          instance: Instance key.
        """

    def send(self, value: tf.Tensor, target: int, instance: int) -> tf.Tensor:
        """Sends to one member, which calls `receive` with the same instance key.

        Args:
          value: Of any static shape.
          target: Place of the receiver among the members.
          instance: Instance key.

        Returns:
          A tensor on which something that is used must depend: a function drops calls whose result is not used, and the
          receiver would wait forever.
        """

    def receive(self, shape: tf.TensorShape, dtype: tf.DType, source: int, instance: int) -> tf.Tensor:
        """The tensor that one member sends with this instance key.

        Args:
          shape: Its static shape.
          dtype: Its type.
          source: Place of the sender among the members.
          instance: Instance key.
        """


class Exchanged(NamedTuple):
    """The results of an exchange of encoded vectors.

    Attributes:
      sums: Float32, in the shapes of the tensors; the same bits on all members.
      residuals: The new residuals; None if they are variables, which are updated in place.
      norms: Squared L2 norms of the tensors and of the worker's new residual, float32 [2]; NaN if they are not
        measured.
    """

    sums: list[tf.Tensor]
    residuals: list[tf.Tensor] | None
    norms: tf.Tensor


@runtime_checkable
class Pipelined(Protocol):
    """The additional method of a group whose transport has an operation for a whole exchange."""

    def exchange(
        self,
        tensors: Sequence[tf.Tensor],
        codec: Codec,
        residuals: Sequence[tf.Tensor] | Sequence[tf.Variable],
        seed_steps: tf.Tensor,
        measures_norms: tf.Tensor,
        instance: int,
    ) -> Exchanged:
        """Sums tensors over the members in one operation, which encodes, sends, sums and decodes in chunks.

        The tensors have L elements in all, a member's shard has S; the vector is cut as by `tfpar_ops.encode` with
        `size` shards. The results have the bits of `tfpar_ops.encode`, an all-to-all, `tfpar_ops.recode`, an all-gather
        and `tfpar_ops.decode`.

        Args:
          tensors: float32, of any static shapes.
          codec: A codec that keeps every element.
          residuals: The worker's residual, [L], and the residual of this member's shard, with as many elements as
            exist in it. Variables are changed in place; tensors without elements mean no residuals.
          seed_steps: int64 [2, 2], seed and step of stochastic rounding: of the worker's payloads, and of the sums.
          measures_norms: Bool scalar; if false, the norms are NaN, and take no time.
          instance: Instance key.
        """


def group_key(members: Sequence[int], device_type: str = "CPU") -> int:
    """The key of a set of members: the same for the same set, on every worker, without communication.

    Two members have an exact key, since any two workers may exchange messages. Larger sets have a hash: among a
    thousand of them, two have the same key with a probability of 3e-4, and TensorFlow then refuses the second group.

    Args:
      members: Ranks among all workers, in any order.
      device_type: `CPU` or `GPU`. Members on GPUs have another key: a group consists of devices of one type.

    Returns:
      An int32, larger than the keys of TensorFlow's strategies.
    """
    if len(members) == 2 and (index := _pair_index(members, device_type)) < _FIRST_WORLD_MESSAGE_KEY - _FIRST_KEY:
        return _FIRST_KEY + index
    return _hashed(f"{device_type} {sorted(members)}")


def message_key(
    members: Sequence[int], one: int, other: int, device_type: str = "CPU", *, all_workers: bool = False
) -> int:
    """The key of messages between two members of a group.

    Not their `group_key`: other groups of which both are members may have counted the same instance keys.

    Args:
      members: Ranks of all members among all workers, in any order.
      one: Rank of one of the two.
      other: Rank of the other.
      device_type: See `group_key`.
      all_workers: Whether the members are all workers: any two then have an exact key, as all may exchange messages.
    """
    pair = (one, other)
    limit = _FIRST_HASHED_KEY - _FIRST_WORLD_MESSAGE_KEY
    if all_workers and (index := _pair_index(pair, device_type)) < limit:
        return _FIRST_WORLD_MESSAGE_KEY + index
    return _hashed(f"{device_type} {sorted(members)}: {sorted(pair)}")


def channel_key(source: int, target: int, device_type: str = "CPU") -> int:
    """The key of messages in one direction: such a key has one sender.

    Args:
      source: Rank of the sender among all workers.
      target: Rank of the receiver.
      device_type: See `group_key`.
    """
    return _hashed(f"{device_type} {source} to {target}")


def _pair_index(pair: Sequence[int], device_type: str) -> int:
    """A number for each pair of ranks and type of device, from 0."""
    low, high = sorted(pair)
    return high * (high - 1) + 2 * low + _DEVICE_TYPES.index(device_type)


def _hashed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return _FIRST_HASHED_KEY + int.from_bytes(digest, "little") % (_END_OF_KEYS - _FIRST_HASHED_KEY)


class InstanceKeys:
    """Counts instance keys: those of all workers' calls, and those of every smaller group's, each from its start.

    TensorFlow 2.21 distinguishes instances of different groups, so groups may count the same numbers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_all_workers = itertools.count(HOST_MESSAGE_KEYS.stop)
        self._of_members: dict[tuple[int, ...], itertools.count[int]] = {}

    def allocate(self, count: int, group: Group | None) -> list[int]:
        """See `allocate_instance_keys`."""
        with self._lock:
            counter = self._of_all_workers
            if group is not None:
                counter = self._of_members.setdefault(group.members, itertools.count(_FIRST_SUBGROUP_INSTANCE))
            return list(itertools.islice(counter, count))


_instance_keys = InstanceKeys()


def allocate_instance_keys(count: int, group: Group | None = None) -> list[int]:
    """Consecutive instance keys that no other call site of the group has.

    Args:
      count: How many.
      group: The group whose calls use them; all its members, and no other worker, must allocate the same counts in the
        same order. By default, all workers must.
    """
    return _instance_keys.allocate(count, group)

"""`GlooGroup`: groups over the native transport, whose engine is Gloo.

Its operations run on the CPU. TensorFlow copies the tensors of a GPU to them and back through pinned host memory (2.21,
`IntraProcessRecvAsyncImpl`).

One mesh of connections between all workers serves every group; keys distinguish the calls. `start` in
`tfpar.collectives.gloo_mesh` connects it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpar.collectives.group import Capabilities, Exchanged, group_key, message_key
from tfpar.collectives.tensorflow import run_unordered
from tfpar_ops import Codec
from tfpar_ops.codecs import GPU_PEERS
from tfpar_ops.transport_library import transport_library

import tensorflow as tf

# Types that the operations can sum; values that are only sent may be of any type.
_DTYPES = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64})
CHUNK_BYTES = 512 << 10  # `kChunkBytes` in tfpar_ops/transport


@dataclasses.dataclass(frozen=True)
class GlooGroup:
    """A `Group` over the native transport. Make one with `new_group` or `world_group` while a mesh is up.

    Groups of CPUs are of `PipelinedGlooGroup`. Those of GPUs encode on the GPUs, so that payloads alone are copied.

    Values are added in the order of the ranks, each sum by one worker, so that all members have the same bits.

    Attributes:
      members: Ranks of the members, or numbers of their devices, ascending.
      rank: Place of this worker among the members.
      mesh: Number of the mesh in this process.
      workers: Ranks of the workers that the members are or belong to, in the same order.
      all_workers: Whether the members are all workers, whose messages have exact keys (`message_key`).
      on_gpus: Whether the members are GPUs.
    """

    members: tuple[int, ...]
    rank: int
    mesh: int
    workers: tuple[int, ...]
    all_workers: bool = False
    on_gpus: bool = False

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def key(self) -> int:
        """The group key of its collectives."""
        return group_key(self.members)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the group."""
        return Capabilities(
            ordered=False,
            largest_fan_in=GPU_PEERS if self.on_gpus else None,
            dtypes=_DTYPES,
            messages=True,
            variable_sizes=True,
            chunk_bytes=CHUNK_BYTES,
        )

    def all_reduce(self, value: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group.all_reduce`."""
        return self._collective("tfpar_all_reduce", value=value, instance=instance)

    def all_to_all(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group.all_to_all`."""
        return self._collective("tfpar_all_to_all", rows=rows, instance=instance)

    def all_gather(self, row: tf.Tensor, instance: int | tf.Tensor) -> tf.Tensor:
        """See `Group.all_gather`."""
        return self._collective("tfpar_all_gather", row=row, instance=instance)

    def reduce_scatter(self, rows: tf.Tensor, instance: int) -> tf.Tensor:
        """See `Group.reduce_scatter`."""
        return self._collective("tfpar_reduce_scatter", rows=rows, instance=instance)

    def broadcast(self, value: tf.Tensor, source: int, instance: int) -> tf.Tensor:
        """The value of the member with the place `source`, which has the same shape on all."""
        return self._collective("tfpar_broadcast", value=value, instance=instance, peer=source)

    def barrier(self, instance: int) -> tf.Tensor:
        """The number of members, once all have called this."""
        return self._collective("tfpar_barrier", instance=instance)

    def send(self, value: tf.Tensor, target: int, instance: int) -> tf.Tensor:
        """See `Group.send`."""
        return self._message("tfpar_send", target, value=value, instance=instance)

    def receive(self, shape: tf.TensorShape, dtype: tf.DType, source: int, instance: int) -> tf.Tensor:
        """See `Group.receive`."""
        return self._message("tfpar_receive", source, instance=instance, T=dtype, shape=shape)

    def _collective(self, operation: str, **arguments: Any) -> tf.Tensor:
        return self._call(operation, self.key, **arguments)

    def _message(self, operation: str, peer: int, **arguments: Any) -> tf.Tensor:
        pair = self.members[self.rank], self.members[peer]
        key = message_key(self.members, *pair, all_workers=self.all_workers)
        return self._call(operation, key, peer=peer, **arguments)

    def _call(self, operation: str, key: int, **arguments: Any) -> tf.Tensor:
        called = getattr(transport_library().operations, operation)
        with tf.device("/device:CPU:0"):
            return run_unordered(called(mesh=self.mesh, group=key, members=self.workers, place=self.rank, **arguments))


@dataclasses.dataclass(frozen=True)
class PipelinedGlooGroup(GlooGroup):
    """A group of CPUs, which exchange encoded tensors in one operation (`Pipelined`)."""

    def exchange(
        self,
        tensors: Sequence[tf.Tensor],
        codec: Codec,
        residuals: Sequence[tf.Tensor] | Sequence[tf.Variable],
        seed_steps: tf.Tensor,
        measures_norms: tf.Tensor,
        instance: int,
    ) -> Exchanged:
        """See `Pipelined.exchange`."""
        operations = transport_library().operations
        attributes = {name: getattr(codec, name) for name in ("kind", "block", "keep", "scale", "rounding")}
        group = {"mesh": self.mesh, "group": self.key, "members": self.workers, "place": self.rank}
        inputs = {"seed_steps": seed_steps, "measures_norms": measures_norms, "instance": instance}
        common = {**inputs, **attributes, **group}
        with tf.device("/device:CPU:0"):
            if isinstance(residuals[0], tf.Variable):
                worker, owner = (residual.handle for residual in residuals)
                sums, norms = operations.tfpar_exchange_resource(tensors, worker, owner, **common)
                return Exchanged(sums, None, norms)
            sums, *changed, norms = operations.tfpar_exchange(tensors, *residuals, **common)
        run_unordered(norms)
        return Exchanged(sums, changed, norms)

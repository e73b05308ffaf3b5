"""The workers that share a replica."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import new_group, world_group
from tfpar.parallel.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaPeers:
    """The workers that share this worker's replica, each with a part of it.

    Reading a whole value is a collective call: all these workers must make it, in the same order.

    Attributes:
      rank: Rank of this worker among them, from 0.
      agreement: The agreement between them.
    """

    rank: int
    agreement: WorkerAgreement

    @classmethod
    def of(cls, topology: Topology) -> ReplicaPeers | None:
        """Returns the workers that share a replica with this one; None if this worker has whole replicas."""
        if topology.replica_workers == 1:
            return None
        first = topology.worker - topology.replica_part
        members = range(first, first + topology.replica_workers)
        return cls(topology.replica_part, WorkerAgreement(new_group(members, topology.worker), "reading a weight"))

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.agreement.size


def exchanging_workers(topology: Topology, device: str = "") -> dict[str, Any]:
    """Returns the workers that exchange gradients with this one, as arguments of `Exchange.build`.

    These are all workers or, if workers hold parts of a replica, those with the same part.

    Args:
      topology: The topology of the run.
      device: For an exchange other than that of the gradients, the device on which this worker runs it, with its own
        collective calls; empty for gradients.
    """
    if device:
        return {"group": world_group(topology.workers, max(topology.worker, 0), device)}
    if topology.replica_workers > 1:
        return {"group": new_group(topology.workers_alike, topology.worker)}
    return {"workers": topology.workers if topology.synchronous else 1, "worker": max(topology.worker, 0)}

"""The workers that share a replica, or the layers of a stage."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import new_group, world_group
from tfpar.parallel.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaPeers:
    """Workers that share a replica, or the layers of a stage, each with a part.

    Reading a whole value is a collective call: all these workers must make it, in the same order.

    Attributes:
      rank: Rank of this worker among them, from 0.
      agreement: The agreement between them.
    """

    rank: int
    agreement: WorkerAgreement

    @classmethod
    def of_stages(cls, topology: Topology) -> ReplicaPeers | None:
        """Returns the workers that have the stages of a replica: of each stage, one, with the same part of its layers
        as this worker. None if this worker has all stages."""
        return cls._of(topology, topology.pipeline_part, topology.pipeline_workers, topology.model_workers)

    @classmethod
    def of_replica(cls, topology: Topology, activity: str) -> ReplicaPeers | None:
        """Returns the workers that share a replica; None if this worker has the whole one.

        Args:
          topology: The topology of the run.
          activity: What the agreement is for, see `WorkerAgreement`.
        """
        return cls._of(topology, topology.replica_part, topology.replica_workers, 1, activity)

    @classmethod
    def of_layers(cls, topology: Topology) -> ReplicaPeers | None:
        """Returns the workers that divide the same layers; None if this worker has all parts of its layers."""
        return cls._of(topology, topology.model_part, topology.model_workers, 1)

    @classmethod
    def _of(
        cls, topology: Topology, rank: int, size: int, step: int, activity: str = "reading a weight"
    ) -> ReplicaPeers | None:
        if size == 1:
            return None
        first = topology.worker - rank * step
        members = range(first, first + size * step, step)
        return cls(rank, WorkerAgreement(new_group(members, topology.worker), activity))

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
    if topology.replica_workers > 1:
        return {"group": new_group(topology.workers_alike, topology.worker, device)}
    if device:
        return {"group": world_group(topology.workers, max(topology.worker, 0), device)}
    return {"workers": topology.workers if topology.synchronous else 1, "worker": max(topology.worker, 0)}

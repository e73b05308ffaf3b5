"""A plan for a run on a set of devices, and its predicted time and memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfpar.parallel.mesh import Mesh
from tfpar.parallel.planner.machine import OPS, PROGRAM, STAGES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to distribute a run over devices.

    Attributes:
      mesh: Devices by axis.
      micro_batches: Number of micro-batches of a step on each replica.
      recompute: A value of `--recompute`: `none` or `blocks`.
      shard: A value of `--shard`: what the replicas divide among themselves.
      exchange: A value of `--exchange`.
    """

    mesh: Mesh
    micro_batches: int = 1
    recompute: str = "none"
    shard: str = "none"
    exchange: str = "none"

    @property
    def mesh_text(self) -> str:
        """The mesh as a value of `--mesh`."""
        return self.mesh.text

    @property
    def way(self) -> str:
        """How passes run if XLA compiles them where it can: not where devices communicate in them, or where gradients
        leave one by one."""
        if self.mesh.model > 1 or self.shard == "weights":
            return OPS
        if self.mesh.pipeline > 1:
            return STAGES
        return OPS if self.shard == "gradients" else PROGRAM

    def options(self) -> dict[str, Any]:
        """Returns the options that make a run follow the plan, by flag name."""
        return {
            "mesh": self.mesh_text,
            "accumulate_steps": self.micro_batches,
            "recompute": self.recompute,
            "shard": self.shard,
            "exchange": self.exchange,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, by activity.

    Attributes:
      compute: Forward and backward passes on the busiest device.
      bubble: Waiting for other stages of the pipeline.
      sums: Sums and gathers along the model axis.
      messages: Sending activations between stages, as far as passes wait for them.
      exchange: Exchanging gradients between replicas.
      update: Adding up the gradients of micro-batches, and updating the weights.
    """

    compute: float
    bubble: float = 0.0
    sums: float = 0.0
    messages: float = 0.0
    exchange: float = 0.0
    update: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(dataclasses.astuple(self))

    @property
    def limit(self) -> str:
        """The activity that takes longest."""
        parts = dataclasses.asdict(self)
        return max(parts, key=parts.__getitem__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest device, by content.

    Attributes:
      weights: All variables of the model.
      gradients: Gradients of a micro-batch.
      accumulated: Gradients accumulated over several micro-batches, or sums of shards beside whole gradients.
      summed: Gradients that are left for the update.
      state: The optimizer's state, and the owner's exact copy of the weights in its shard.
      residuals: Residuals of a lossy exchange.
      activations: Activations that the backward pass reads.
      gathered: Whole weights that layers gather while they run, and whole gradients that leave for owners of shards.
      exchange: What the exchange of gradients needs beside them.
      update: What the optimizer's update needs in addition.
      inputs: Batches that are prepared, and what the source of the examples keeps.
      one_program: Whether passes and update are one XLA program, whose buffers all exist at once. Otherwise activations
        are freed before the update.
      adds_in_place: Whether passes add up gradients one by one, so that `accumulated` is freed before the exchange.
      in_turn: Whether gradients take the place of activations: in passes op by op.
      exchanges_early: Whether gradients are exchanged while there are activations, unless they take their place.
    """

    weights: int
    gradients: int
    accumulated: int = 0
    summed: int = 0
    state: int = 0
    residuals: int = 0
    activations: int = 0
    gathered: int = 0
    exchange: int = 0
    update: int = 0
    inputs: int = 0
    one_program: bool = False
    adds_in_place: bool = False
    in_turn: bool = False
    exchanges_early: bool = False

    @property
    def lasting(self) -> int:
        """Bytes that stay allocated from step to step."""
        return self.weights + self.state + self.residuals + self.inputs

    @property
    def size(self) -> int:
        """Peak memory: the lasting bytes, and the most that a phase needs at once."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the peak by name; zero for those that do not exist then."""
        nothing = dict.fromkeys(("gradients", "accumulated", "activations", "gathered", "exchange", "update"), 0)
        phases: list[dict[str, int]] = [{**nothing, **phase} for phase in self._phases()]
        lasting = {name: getattr(self, name) for name in ("weights", "state", "residuals", "inputs")}
        largest = max(phases, key=lambda phase: sum(phase.values()))
        return {**lasting, **largest}

    def _phases(self) -> list[dict[str, int]]:
        """What each phase of a step needs."""
        sums = {"gradients": self.gradients, "accumulated": self.accumulated, "gathered": self.gathered}
        passes = {**sums, "activations": self.activations}
        if self.one_program:
            return [{**passes, "update": self.update}]
        update = {"gradients": self.summed, "update": self.update}
        if self.exchanges_early and not self.in_turn:
            return [{**passes, "exchange": self.exchange}, update]
        exchange = {**sums, "exchange": self.exchange}
        if self.adds_in_place:
            exchange["accumulated"] = 0
        if not self.in_turn:
            return [passes, exchange, update]
        return [{**passes, "gradients": 0}, exchange, update]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time and memory of a plan.

    Attributes:
      plan: The plan.
      time: Time of a step.
      memory: Memory of the fullest device.
      fits: Whether a device has that much memory.
    """

    plan: Plan
    time: StepTime
    memory: Memory
    fits: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The plan's options, seconds and bytes, by name."""
        return {
            **self.plan.options(),
            "seconds": self.time.seconds,
            "seconds_by_part": dataclasses.asdict(self.time),
            "bytes": self.memory.size,
            "bytes_by_part": self.memory.parts,
            "fits": self.fits,
        }

"""Predicts the memory of the device that needs the most under a plan: bytes of tensors that exist at once.

A device holds its weights; the optimizer state (an owner of a shard holds its share, and an exact copy of the weights
in that share: Rajbhandari et al. 2020, arXiv:1910.02054); the residuals of a lossy exchange; and on CPUs, the batches
that the input pipeline has prepared, and the examples or tables that its source keeps. Beside these it needs the most
that one of three phases needs:

- Passes: activations of a micro-batch, times the number of micro-batches in flight on a stage of a pipeline; and
  gradients. An XLA program allocates all gradients when it starts, and adds up those of micro-batches in them, tensor
  by tensor. Op by op, gradients take the place of activations. A stage has the gradients of a micro-batch beside the
  sums.
- Exchange: gradients, and their sums or the buffers in which they are put together; the replicas of a CPU sum one
  tensor after the other, and free what they have summed. Sharded gradients over workers leave while the backward pass
  goes on: both take the place of activations, or are beside those of a stage. Of sharded weights, those of a layer are
  whole while it runs, and so are gradients until they have left.
- Update: gradients, and the weights before a step whose change is reported, from which its norm is computed, or all
  new weights if they come from the owners of shards. As an XLA program it changes variables in place. Op by op, new
  values of a group of weights and of their state exist beside the old ones (`pure_apply`), for which gradients are
  freed, and an intermediate result: the operations of an optimizer write into their inputs where they can.

XLA fuses operations and so keeps only the fraction `Machine.fused` of the activations that the graph keeps, and the
backward pass of a stage computes again what is cheap to compute, so that the fraction is `Machine.fused_in_stages`;
while that of a micro-batch runs, the fraction `Machine.fleeting` exists beside. Passes without XLA keep all.

The devices of one CPU share its memory, and what exists once in a worker: the sums over its replicas, the weights
before a step, those that owners of shards send, and, until their first update, initial values. What counts there is the
mean of a worker's devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from tfpar.parallel.planner.costs import Weight, state_of
from tfpar.parallel.planner.machine import OPS, PROGRAM, Machine
from tfpar.parallel.planner.plan import Memory, Plan
from tfpar.parallel.planner.stages import Replica

UPDATE_GROUP_BYTES = 16 << 20  # weights that are updated together without XLA
_INTERMEDIATE = 3  # tensors of the size of all weights, beside new values, if they are not updated in groups
_OWN_STATE = ("optimizer", "gradients", "weights")  # values of --shard with which replicas divide the optimizer state


def memory_of(
    replica: Replica,
    plan: Plan,
    machine: Machine,
    examples: int,
    *,
    outer_per_weight: int = 0,
    remembers: bool = False,
    schedule: str = "1f1b",
    compiled: bool = True,
    compiles_update: bool = True,
    in_groups: bool = True,
    inputs: int = 0,
) -> Memory:
    """Predicts the memory of the device of a replica that needs the most.

    Args:
      replica: The stages of the replica.
      plan: The plan.
      machine: The devices.
      examples: Number of examples in a micro-batch on a replica.
      outer_per_weight: Bytes of outer weights and their optimizer's state per float32 weight, with local steps.
      remembers: Whether the exchange has residuals.
      schedule: Schedule of a pipeline, `1f1b`, `eager_1f1b` or `gpipe`.
      compiled: Whether XLA compiles passes where it can.
      compiles_update: Whether XLA compiles the update where it can.
      in_groups: Whether weights are updated group by group without XLA.
      inputs: Bytes of the input pipeline on a device.
    """
    where, way = _where(plan, machine), plan.way if compiled else OPS
    fractions = _fractions(plan, way, machine, examples)
    in_place = compiles_update and replica.way_of_update(plan.shard) == PROGRAM
    # The devices of a CPU are updated together, in groups that mix their weights.
    together = not in_place and machine.shares_memory and not replica.here
    found = []
    for device, weights in enumerate(replica.weights):
        lasting = _of_weights(weights, plan, way, where, remembers=remembers)
        lasting["state"] += sum(weight.size for weight in weights if weight.trainable) * outer_per_weight // 4
        updated = [weight for each in replica.weights for weight in each] if together else weights
        copies = 0.0 if in_place else _copies(updated)
        update = _update(updated, plan, where, copies, lasting["state"], in_groups=in_groups)
        found.append(
            Memory(
                **lasting,
                activations=_activations(replica, device, plan, examples, schedule, fractions),
                gathered=_gathered(replica, device, plan),
                exchange=_exchange(weights, plan, where),
                update=update // (replica.devices if together else 1),
                inputs=inputs,
                one_program=way == PROGRAM and plan.mesh.devices == 1,
                in_turn=way == OPS,
                adds_in_place=way == PROGRAM,
                exchanges_early=plan.shard == "gradients" and where.workers > 1,
            )
        )
    here = (replica.here or replica.devices) if machine.shares_memory else 1
    means = (_mean(found[first : first + here]) for first in range(0, len(found), here))
    return max(means, key=lambda memory: memory.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Where:
    """Where the replicas of a plan are.

    Attributes:
      workers: Workers, or groups of workers, that exchange gradients.
      once: The share of a device in what exists once for the replicas of a worker; 1 if it is the device that has it.
      shares_initial: Whether replicas share the memory of their variables until these change.
    """

    workers: int
    once: float
    shares_initial: bool


class _Fractions(NamedTuple):
    """Fractions of activations that exist where the graph has all.

    Attributes:
      kept: Of those that are kept for the backward pass.
      again: Of those of a block that is computed again.
      fleeting: Of those of a micro-batch, beside what is kept, while its backward pass runs.
    """

    kept: float = 1.0
    again: float = 1.0
    fleeting: float = 0.0


def _fractions(plan: Plan, way: str, machine: Machine, examples: int) -> _Fractions:
    """Returns the fractions of activations that XLA keeps."""
    if way == OPS:
        return _Fractions()
    fused = machine.fused_for(examples)
    if way == PROGRAM:
        return _Fractions(fused, fused)
    if plan.recompute != "none":
        return _Fractions(again=fused)  # what a stage keeps are inputs of blocks
    return _Fractions(machine.fused_in_stages, fleeting=machine.fleeting_for(examples))


def _where(plan: Plan, machine: Machine) -> _Where:
    local = max(1, machine.devices // plan.mesh.devices_of_replica)
    return _Where(
        workers=plan.mesh.data // local,
        once=1 / local if machine.shares_memory else 1.0,
        shares_initial=machine.shares_memory and local > 1,
    )


def _mean(of_devices: Sequence[Memory]) -> Memory:
    """Returns the mean of the devices of a worker."""
    parts = [field.name for field in dataclasses.fields(Memory) if field.type == "int"]
    mean = {name: sum(getattr(each, name) for each in of_devices) // len(of_devices) for name in parts}
    return dataclasses.replace(of_devices[0], **mean)


def _of_weights(weights: Sequence[Weight], plan: Plan, way: str, where: _Where, *, remembers: bool) -> dict[str, int]:
    """Returns the bytes that depend on the weights of a device."""
    replicas = plan.mesh.data
    size = sum(weight.size for weight in weights)
    trained = sum(weight.size for weight in weights if weight.trainable)
    state = state_of(weights)
    if plan.shard in _OWN_STATE:
        state = (state + (trained if plan.shard != "weights" else 0)) // replicas
    if plan.shard == "weights":
        size //= replicas  # frozen weights as well
    elif plan.shard in _OWN_STATE:
        size = int(size * where.once)  # what owners send is put together once
    sums = trained // replicas if plan.shard in ("gradients", "weights") else trained
    largest = max((weight.size for weight in weights if weight.trainable), default=0)
    in_stages = plan.mesh.pipeline > 1 and plan.shard == "gradients"
    accumulated = sums if plan.micro_batches > 1 or in_stages else 0
    if accumulated and way == PROGRAM:
        accumulated = largest  # it adds up in place
    return {
        "weights": size,
        "gradients": sums if plan.shard == "weights" else trained,
        "accumulated": accumulated,
        "summed": trained // replicas if plan.shard in _OWN_STATE else int(trained * where.once),
        "state": state,
        "residuals": trained + trained // where.workers if remembers and where.workers > 1 else 0,
    }


def _gathered(replica: Replica, device: int, plan: Plan) -> int:
    """Returns the bytes of gathered weights, and of whole gradients, under `--shard=weights`."""
    if plan.shard != "weights":
        return 0
    return max(stage.most_gathered for stage in replica.of_device(device))


def _exchange(weights: Sequence[Weight], plan: Plan, where: _Where) -> int:
    """Returns the bytes that the exchange of a device's gradients needs beside them: their sums, or buffers in which
    they are put together."""
    if plan.mesh.data == 1 or plan.shard == "weights":
        return 0
    sizes = [weight.size for weight in weights if weight.trainable]
    if where.shares_initial and where.workers == 1 and plan.shard != "gradients":
        return int(max(sizes, default=0) * where.once)  # what is summed over the replicas of a worker is freed at once
    return int(sum(sizes) * where.once)


def _copies(weights: Sequence[Weight]) -> float:
    """Returns the bytes of new values of weights and of their state, as a multiple of those of the weights."""
    size = sum(weight.size for weight in weights if weight.trainable)
    return 1 + state_of(weights) / max(size, 1)


def _update(weights: Sequence[Weight], plan: Plan, where: _Where, copies: float, state: int, *, in_groups: bool) -> int:
    """Returns the bytes that the update of a device's weights needs.

    Args:
      weights: The weights.
      plan: The plan.
      where: Where its replicas are.
      copies: See `_copies`; 0 if an XLA program updates in place.
      state: Bytes of the device's optimizer state.
      in_groups: Whether there are groups.
    """
    sizes = [weight.size for weight in weights if weight.trainable]
    own = [size // plan.mesh.data if plan.shard in _OWN_STATE else size for size in sizes]
    kept = sum(own if plan.shard == "weights" else sizes)
    if plan.shard == "none" and where.shares_initial:
        # In the first step, each replica gets memory of its own, while the last one has that of the initial values.
        kept += state
    if plan.shard != "weights":
        kept = int(kept * where.once)
    if not copies:
        return kept
    if not in_groups:
        return kept + int((copies + _INTERMEDIATE) * sum(own))
    group = _largest_group(own)
    if plan.shard == "none" and not where.shares_initial:
        # Gradients go with their groups, so that there are those of later groups and the old weights of earlier ones.
        return int((copies - 1) * group) + max(own, default=0)
    # The old values of a group are those that its variables still have.
    return max(0, kept - group) + int(copies * group) + max(own, default=0)


def _largest_group(sizes: Sequence[int]) -> int:
    """Returns the bytes of the largest group of weights of these sizes.

    Groups are made as `PureUpdate.view_update` does, which in a pipeline within a process mixes weights of all devices.
    """
    largest = group = 0
    for size in sizes:
        group = (0 if group >= UPDATE_GROUP_BYTES else group) + size
        largest = max(largest, group)
    return largest


def _activations(replica: Replica, device: int, plan: Plan, examples: int, schedule: str, fractions: _Fractions) -> int:
    """Returns the bytes of activations that a device keeps for backward passes, and that these need."""
    kept = whole = largest = one = 0.0
    for number, stage in enumerate(replica.stages):
        if number % replica.devices != device:
            continue
        again = stage.again(plan)
        flights = replica.in_flight(number, plan.micro_batches, schedule)
        kept += again.kept * examples * flights
        whole += stage.kept * examples * flights
        largest = max(largest, again.largest)
        one = max(one, stage.kept * examples)
    most = max(fractions.kept, fractions.again) * whole
    return int(min(fractions.kept * kept + fractions.again * largest * examples, most) + fractions.fleeting * one)

"""Predicts the memory of the device that needs the most under a plan.

A device holds its weights; their gradients; with micro-batches, the accumulated gradients; the optimizer state (an
owner of a shard holds its share, and an exact copy of the weights in that share: Rajbhandari et al. 2020,
arXiv:1910.02054); and the residuals of a lossy exchange. With sharded gradients, a stage of a pipeline has all
gradients of a micro-batch beside the sums of its shards; without a pipeline, gradients leave one by one. The backward
pass reads activations: those of a micro-batch, times the number of micro-batches in flight on a stage of a pipeline.
The optimizer's update needs no activations, but the weights before a step whose change is reported, from which its norm
is computed, or all new weights if they come from the owners of shards. As an XLA program it changes variables in place;
op by op it has new values and intermediate results of a group of weights (`pure_apply`).

XLA fuses operations and so keeps only the fraction `Machine.fused` of the activations that the graph keeps, and the
backward pass of a stage computes again what is cheap to compute, so that the fraction is `Machine.fused_in_stages`.
Passes without XLA keep all.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.parallel.planner.costs import Weight
from tfpar.parallel.planner.machine import PROGRAM, STAGES, Machine
from tfpar.parallel.planner.plan import Memory, Plan
from tfpar.parallel.planner.stages import Replica

UPDATE_GROUP_BYTES = 16 << 20  # weights that are updated together without XLA
_INTERMEDIATE = 3  # tensors of the size of the weights, beside their new values and those of the state: AdamW
_OWN_STATE = ("optimizer", "gradients", "weights")  # values of --shard with which replicas divide the optimizer state


def memory_of(
    replica: Replica,
    plan: Plan,
    machine: Machine,
    examples: int,
    state_per_weight: int,
    *,
    outer_per_weight: int = 0,
    remembers: bool = False,
    schedule: str = "1f1b",
    compiled: bool = True,
    compiles_update: bool = True,
    in_groups: bool = True,
) -> Memory:
    """Predicts the memory of the device of a replica that needs the most.

    Args:
      replica: The stages of the replica.
      plan: The plan.
      machine: The devices.
      examples: Number of examples in a micro-batch on a replica.
      state_per_weight: Bytes of the optimizer's state per float32 weight.
      outer_per_weight: Bytes of outer weights and their optimizer's state per float32 weight, with local steps.
      remembers: Whether the exchange has residuals.
      schedule: Schedule of a pipeline, `1f1b`, `eager_1f1b` or `gpipe`.
      compiled: Whether XLA compiles passes where it can.
      compiles_update: Whether XLA compiles the update where it can.
      in_groups: Whether weights are updated group by group without XLA.
    """
    workers = plan.mesh.data // max(1, machine.devices // plan.mesh.devices_of_replica)
    in_program = compiled and plan.way == PROGRAM
    fused = {PROGRAM: machine.fused, STAGES: machine.fused_in_stages}.get(plan.way, 1.0) if compiled else 1.0
    if plan.way == STAGES and plan.recompute != "none":
        fused = 1.0  # what is kept are the inputs of blocks
    copies = (
        0
        if compiles_update and replica.way_of_update(plan.shard) == PROGRAM
        else 1 + state_per_weight // 4 + _INTERMEDIATE
    )
    found = []
    for device in range(replica.devices):
        weights = replica.weights[device]
        lasting = _of_weights(weights, plan, state_per_weight, workers if remembers else 1)
        lasting["state"] += sum(weight.size for weight in weights if weight.trainable) * outer_per_weight // 4
        activations = int(_activations(replica, device, plan, examples, schedule) * fused)
        found.append(
            Memory(
                **lasting,
                activations=activations + _gathered(replica, device, plan),
                update=_update(weights, plan, copies, in_groups=in_groups),
                one_program=in_program and plan.mesh.devices == 1,
            )
        )
    return max(found, key=lambda memory: memory.size)


def _of_weights(weights: Sequence[Weight], plan: Plan, state_per_weight: int, workers: int) -> dict[str, int]:
    """Returns the bytes that depend on the weights of a device."""
    replicas = plan.mesh.data
    size = sum(weight.size for weight in weights)
    trained = sum(weight.size for weight in weights if weight.trainable)
    state = trained * state_per_weight // 4
    if plan.shard in _OWN_STATE:
        state = (state + (trained if plan.shard != "weights" else 0)) // replicas
    if plan.shard == "weights":
        size //= replicas  # frozen weights as well
    sums = trained // replicas if plan.shard in ("gradients", "weights") else trained
    # A stage returns the gradients of a micro-batch at once.
    in_stages = plan.mesh.pipeline > 1 and plan.shard == "gradients"
    return {
        "weights": size,
        "gradients": trained if in_stages else sums,
        "accumulated": sums if plan.micro_batches > 1 or in_stages else 0,
        "state": state,
        "residuals": trained + trained // workers if workers > 1 else 0,
    }


def _gathered(replica: Replica, device: int, plan: Plan) -> int:
    """Returns the bytes of the largest layer's whole weights, and of their gradients, under `--shard=weights`."""
    if plan.shard != "weights":
        return 0
    return 2 * max(stage.largest_weights for stage in replica.of_device(device))


def _update(weights: Sequence[Weight], plan: Plan, copies: int, *, in_groups: bool) -> int:
    """Returns the bytes that the update of a device's weights needs.

    Args:
      weights: The weights.
      plan: The plan.
      copies: Tensors of the size of a group of weights that exist at once; 0 if an XLA program updates in place.
      in_groups: Whether there are groups.
    """
    sizes = [weight.size for weight in weights if weight.trainable]
    own = [size // plan.mesh.data if plan.shard in _OWN_STATE else size for size in sizes]
    kept = sum(own if plan.shard == "weights" else sizes)
    return kept + copies * (_largest_group(own) if in_groups else sum(own))


def _largest_group(sizes: Sequence[int]) -> int:
    """Returns the bytes of the largest group of weights of these sizes.

    Groups are made as `PureUpdate.view_update` does, which in a pipeline within a process mixes weights of all devices.
    """
    largest = group = 0
    for size in sizes:
        group = (0 if group >= UPDATE_GROUP_BYTES else group) + size
        largest = max(largest, group)
    return largest


def _activations(replica: Replica, device: int, plan: Plan, examples: int, schedule: str) -> float:
    """Returns the bytes that a device keeps for backward passes, before XLA fuses operations."""
    kept = whole = largest = 0.0
    for number, stage in enumerate(replica.stages):
        if number % replica.devices != device:
            continue
        of_stage = stage.kept_recomputed if plan.recompute != "none" else stage.kept
        flights = replica.in_flight(number, plan.micro_batches, schedule)
        kept += of_stage * examples * flights
        whole += stage.kept * examples * flights
        largest = max(largest, stage.largest if plan.recompute != "none" else 0.0)
    return min(kept + largest * examples, whole)

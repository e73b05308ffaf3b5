"""Predicts the time of a step under a plan.

Passes: a device takes F / rate for F FLOPs, where F is three times the FLOPs of the forward pass, or four times with
recomputation, and the rate is that of passes with as many examples. For M micro-batches, a pipeline of S devices with V
stages each takes M turns of its slowest device and, to fill and drain, one turn of each other device divided by V
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2: M + (S - 1) / V turns if all are equal). If the devices of a
worker share cores, a step takes at least the time of all their work at the rate of the cores.

Sums along the model axis, of activations and once per step of the gradients of whole weights, are ring all-reduces,
assumed not to overlap with anything. Messages between stages cost their latency and bytes, for the first micro-batch
and where a stage has started as many as its schedule lets it and waits for the first of them to be back. Gradients are
summed over the replicas of a worker, then between workers, assumed not to overlap with the passes; sharded weights are
gathered twice for every micro-batch, and their gradients scattered. With sharded gradients, the devices of a worker and
of the model axis sum those of every micro-batch. With any shards, gradients and the new weights of a worker's shares
are put together in memory. The gradients of micro-batches are added up. The optimizer reads gradients once, and reads
and writes weights and state once, at the rate of updates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from tfpar.collectives.cost_model import Link, all_reduce
from tfpar.parallel.planner.costs import Weight, state_of
from tfpar.parallel.planner.machine import Machine
from tfpar.parallel.planner.plan import Plan, StepTime
from tfpar.parallel.planner.stages import Replica, Stage

# How long a worker that a message wakes waits for a core that another uses: about a time slice of Linux. Fitted to runs
# of pipelines of four workers on two cores (docs/planner.md).
_SLICE_S = 2.5e-3
# The gradients of activations and of weights cost as much as the forward pass each.
_PASSES = 3
_SHARDED_BYTES = 4096  # of a weight that `--shard=weights` divides


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A way to exchange gradients between workers.

    Attributes:
      name: The value of `--exchange`.
      seconds: `(elements, workers, link) -> seconds`; None for a ring all-reduce of float32 gradients.
      remembers: Whether the exchange has residuals.
      every: Steps from one exchange of workers to the next.
      among: For `auto`: the exchanges of which a run takes the fastest.
    """

    name: str
    seconds: Callable[[int, int, Link], float] | None = None
    remembers: bool = False
    every: int = 1
    among: tuple[Exchange, ...] = ()


DENSE = Exchange("none")


def step_time(
    replica: Replica,
    plan: Plan,
    machine: Machine,
    examples: int,
    exchange: Exchange = DENSE,
    schedule: str = "1f1b",
) -> StepTime:
    """Predicts the time of a step.

    Args:
      replica: The stages of a replica.
      plan: The plan.
      machine: Devices and links.
      examples: Number of examples in a micro-batch on a replica.
      exchange: The exchange of the plan.
      schedule: Schedule of a pipeline, `1f1b`, `eager_1f1b` or `gpipe`.
    """
    mesh, passes, rates = plan.mesh, plan.micro_batches, machine.rates
    per_flop = rates.seconds(plan.way, 1.0, examples)

    def flops(stage: Stage) -> float:
        return _PASSES * stage.flops + stage.again(plan).flops

    def alone(stage: Stage) -> float:
        return per_flop * flops(stage)

    spans = mesh.model > machine.devices
    ring = functools.partial(_ring, link=machine.between if spans else machine.within, machine=machine)
    devices = range(mesh.pipeline)
    work = [sum(map(alone, replica.of_device(device))) for device in devices]
    called = [(size for stage in replica.of_device(each) for size in _sums(stage, plan)) for each in devices]
    summing = [sum(ring(size * examples, mesh.model) for size in sizes) for sizes in called]
    turns = [computed + summed for computed, summed in zip(work, summing, strict=True)]
    slowest = max(devices, key=turns.__getitem__)
    per_device = len(replica.stages) / mesh.pipeline
    scheduled = passes * turns[slowest] + (sum(turns) - turns[slowest]) / per_device
    # The work of all devices that share cores, one after the other at their joint rate.
    if machine.cores:
        processor = rates.processor(plan.way, sum(map(flops, replica.stages)), examples)
        crowded = processor * passes * mesh.model * machine.sharing / mesh.devices_of_replica / machine.cores
    else:
        crowded = sum(work) * passes * mesh.model * machine.crowding / mesh.devices_of_replica
    # The devices of the model axis sum the gradients of each whole weight.
    agreeing = _sent(plan) * sum(ring(_trainable(each, divided=False), mesh.model) for each in replica.weights)
    compute = max(passes * work[slowest], crowded)
    return StepTime(
        compute=compute,
        bubble=max(0.0, scheduled - compute - passes * summing[slowest]),
        sums=passes * summing[slowest] + agreeing,
        messages=_messages(replica, plan, examples, machine, schedule, turns, max(turns[slowest], crowded / passes)),
        exchange=_exchange(replica, plan, machine, exchange),
        update=_adding(replica, plan, machine) + _update(replica, plan, machine),
    )


def _sums(stage: Stage, plan: Plan) -> Sequence[float]:
    """Returns the bytes of each sum along the model axis for a micro-batch of one example."""
    return *stage.sums, *stage.again(plan).sums


def _ring(size: float, devices: int, link: Link, machine: Machine) -> float:
    """Returns the seconds of a sum over devices."""
    return all_reduce(int(size), devices, link, machine.memory_bandwidth).seconds if devices > 1 else 0.0


def _messages(
    replica: Replica,
    plan: Plan,
    examples: int,
    machine: Machine,
    schedule: str,
    turns: Sequence[float],
    turn: float,
) -> float:
    """Returns the seconds in which passes wait for activations of other stages and their gradients.

    A tensor crosses the link between workers once: the devices of a stage send a part each, and gather the parts.

    Args:
      replica: As of `step_time`.
      plan: As of `step_time`.
      examples: As of `step_time`.
      machine: As of `step_time`.
      schedule: As of `step_time`.
      turns: Seconds for which each device is busy with a micro-batch.
      turn: Seconds from one micro-batch to the next without messages.
    """
    if len(replica.stages) == 1:
        return 0.0
    links = max(1, plan.mesh.model // machine.devices)  # of the workers that divide a stage
    gathering = machine.between if links > 1 else machine.within
    taken = []
    for number, stage in enumerate(replica.stages[1:], start=1):
        crosses = replica.here > 0 and number % replica.here == 0
        link = machine.between if crosses else machine.within
        seconds = link.latency + stage.received * examples / (link.bandwidth * (links if crosses else 1))
        if crosses and plan.mesh.model > 1:
            part = stage.received * examples / plan.mesh.model
            seconds += (plan.mesh.model - 1) * (gathering.latency + part / gathering.bandwidth)
        taken.append(seconds)
    # The first stage starts so many micro-batches; for the next, the first one must be back, from all stages.
    started = replica.in_flight(0, plan.micro_batches, schedule)
    there_and_back = sum(turns) + 2 * sum(taken)
    waiting = (plan.micro_batches - 1) // started * max(0.0, there_and_back - started * turn)
    # A link carries a tensor in each direction at a time.
    waiting = max(waiting, (plan.micro_batches - 1) * max(0.0, max(taken) - turn))
    sending = 2 * sum(taken) + waiting
    passes = 2 * (plan.micro_batches + plan.mesh.pipeline - 1)
    return sending + passes * _waiting_for_a_core(replica, machine)


def _waiting_for_a_core(replica: Replica, machine: Machine) -> float:
    """Returns the seconds for which a pass waits after its tensors have come from another worker."""
    if not (replica.here and machine.cores):
        return 0.0
    return _SLICE_S * max(0.0, machine.sharing / machine.cores - 1)


def _exchange(replica: Replica, plan: Plan, machine: Machine, exchange: Exchange) -> float:
    """Returns the seconds of summing gradients over replicas: within a worker, then over the link between workers."""
    mesh = plan.mesh
    if mesh.data == 1:
        return 0.0
    if plan.shard == "weights":
        return _gathering(replica, plan, machine)
    of_worker = max(1, machine.devices // mesh.devices_of_replica)  # replicas
    workers = mesh.data // of_worker
    fullest = max(_trainable(each) for each in replica.weights)
    if machine.crowding > 1:  # they share memory: a sum reads two tensors and writes one
        seconds = 3 * (of_worker - 1) * fullest * mesh.devices_of_replica / machine.rates.adding
    else:
        seconds = _ring(fullest, of_worker, machine.within, machine)
    seconds *= _sent(plan)
    if plan.shard != "none":
        seconds += _joining(plan, machine, fullest, of_worker / mesh.data)
    if workers == 1:
        return seconds
    # Parts of a replica on one worker, each once.
    divided = sum(_trainable(each, divided=True) for each in replica.weights)
    whole = sum(_trainable(each, divided=False) for each in replica.weights)
    spread = max(1, mesh.devices_of_replica // machine.devices)  # workers of a replica
    size = divided * mesh.model / spread + (whole / spread if mesh.pipeline > 1 else whole)
    if spread > 1 and mesh.pipeline > 1:
        size = fullest * max(1, machine.devices)
    if exchange.seconds is None:
        exchanged = _ring(size, workers, machine.between, machine)
    else:
        exchanged = exchange.seconds(int(size / 4), workers, machine.between)
    # Sharded gradients go to their owners after every micro-batch; the sums come back once.
    times = (plan.micro_batches + 1) / 2 if plan.shard == "gradients" else 1
    return seconds + exchanged * times / exchange.every


def _joining(plan: Plan, machine: Machine, size: int, share: float) -> float:
    """Returns the seconds of copies: of gradients, which are put together for their owners, and twice of a worker's
    share of the new weights, which leave a program and are put together. A copy is read and written.

    Args:
      plan: The plan.
      machine: Devices and links.
      size: Bytes of a device's weights.
      share: Of a worker in the weights.
    """
    devices = min(plan.mesh.devices_of_replica, machine.devices) if machine.crowding > 1 else 1  # share their memory
    return 2 * (_sent(plan) + 2 * share) * size * devices / machine.rates.adding


def _sent(plan: Plan) -> int:
    """Returns how often gradients leave their device in a step: after every micro-batch, or once."""
    return plan.micro_batches if plan.shard == "gradients" else 1


def _gathering(replica: Replica, plan: Plan, machine: Machine) -> float:
    """Returns the seconds in which sharded weights are gathered for each forward and each backward pass, and their
    gradients go to the owners; those of frozen weights, which have none, are not sent. The latency is as if each weight
    travelled by itself."""
    link = machine.between if machine.workers > 1 else machine.within
    seconds = 0.0
    for weight in replica.weights[0]:
        if weight.size >= _SHARDED_BYTES:
            size = weight.size * (plan.mesh.data - 1) / plan.mesh.data
            seconds += (3 if weight.trainable else 2) * (link.latency + size / link.bandwidth)
    return plan.micro_batches * seconds


def _adding(replica: Replica, plan: Plan, machine: Machine) -> float:
    """Returns the seconds of adding up the gradients of several micro-batches: of reading two of them, and of writing
    their sum."""
    size = max(_trainable(each) for each in replica.weights)
    owners = plan.mesh.data if plan.shard in ("gradients", "weights") else 1
    touched = 3 * (plan.micro_batches - 1) * size / owners
    return touched * _sharing_bandwidth(machine) / machine.rates.adding


def _sharing_bandwidth(machine: Machine) -> int:
    """Returns the devices that share the memory bandwidth of a device."""
    return machine.devices if machine.crowding > 1 else 1


def _update(replica: Replica, plan: Plan, machine: Machine) -> float:
    """Returns the seconds of reading weights, gradients and state, and of writing weights and state."""
    touched = max(3 * _trainable(each) + 2 * state_of(each) for each in replica.weights)
    owners = plan.mesh.data if plan.shard != "none" else 1
    return touched * _sharing_bandwidth(machine) / owners / machine.rates.update(replica.way_of_update(plan.shard))


def _trainable(weights: Sequence[Weight], divided: bool | None = None) -> int:
    """Returns the bytes of trainable weights: of all, or only of those that are (not) divided."""
    return sum(each.size for each in weights if each.trainable and divided in (None, each.divided))

"""Plans as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.collectives.cost_model import Link
from tfpar.parallel.planner.machine import Machine, format_size
from tfpar.parallel.planner.plan import Prediction
from tfpar.parallel.planner.search import Answer

_WORDS = {
    "compute": "compute",
    "bubble": "pipeline bubble",
    "sums": "sums along the model axis",
    "messages": "messages between stages",
    "exchange": "gradient exchange",
    "update": "optimizer",
}
_NEAR = 0.9  # of a device's memory


def table(answer: Answer, rows: int = 5) -> str:
    """Formats the best plans, one per line, each with its bottlenecks.

    Args:
      answer: The result of `search`.
      rows: Number of plans to show.
    """
    shown = answer.fitting[:rows]
    machine, count = answer.question.machine, len(answer.fitting) + len(answer.others)
    limit = f", {len(answer.others)} of which need more than {format_size(machine.memory)}" if answer.others else ""
    heads = ("mesh", "micro-batches", "recompute", "shard", "exchange", "step", "examples/s", "memory", "limited by")
    cells = [heads, *(_row(each, answer.question.batch, machine) for each in shown)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([f"{count} plans{limit}; the best {len(shown)}:", *(f"  {line}" for line in lines)])


def describe_machine(machine: Machine) -> str:
    """Describes the machine for which plans are predicted, in one line."""
    workers, devices = machine.workers, machine.devices
    shape = f"{workers} worker{'s' * (workers != 1)} x {devices} device{'s' * (devices != 1)}"
    parts = [f"{shape} of {machine.flops / 1e9:,.3g} GFLOP/s"]
    if machine.crowding > 1:
        parts.append(f"which share {machine.worker_flops / 1e9:,.3g} GFLOP/s")
    if machine.memory:
        parts.append(f"{format_size(machine.memory)} each")
    if devices > 1:
        parts.append(f"{_link(machine.within)} within a worker")
    if workers > 1:
        parts.append(f"{_link(machine.between)} between workers")
    return ", ".join(parts)


def _link(link: Link) -> str:
    return f"{link.bandwidth * 8e-9:,.3g} Gbit/s and {link.latency * 1e3:.2g} ms a message"


def _row(prediction: Prediction, batch: int, machine: Machine) -> Sequence[str]:
    plan, seconds = prediction.plan, prediction.time.seconds
    return (
        plan.mesh_text,
        str(plan.micro_batches),
        plan.recompute,
        plan.shard,
        plan.exchange if plan.mesh.data > 1 else "-",
        f"{seconds * 1e3:,.1f} ms" if seconds < 100 else f"{seconds:,.0f} s",
        f"{batch / seconds:,.4g}",
        format_size(prediction.memory.size),
        limits(prediction, machine),
    )


def limits(prediction: Prediction, machine: Machine) -> str:
    """Lists the parts that take more than a tenth of a step, the longest first, and memory if it is nearly full."""
    total = prediction.time.seconds
    shares = {name: seconds / total for name, seconds in dataclasses.asdict(prediction.time).items()}
    named = sorted((name for name, share in shares.items() if share > 0.1), key=lambda name: -shares[name])
    text = [f"{_WORDS[name]} {shares[name]:.0%}" for name in named]
    if machine.memory and prediction.memory.size > _NEAR * machine.memory:
        text.append("memory")
    return ", ".join(text)

"""A model, machines and plans whose costs can be told by hand."""

from __future__ import annotations

import dataclasses

from tfpar.collectives.cost_model import Link
from tfpar.parallel.mesh import Mesh
from tfpar.parallel.planner.costs import LayerCost, ModelCosts, Weight
from tfpar.parallel.planner.machine import Machine
from tfpar.parallel.planner.plan import Plan
from tfpar.parallel.planner.search import Question

FREE = Link(0.0, 1e30)
MB = 1_000_000
ROOMY = Machine(flops=1e12, memory_bandwidth=1e30, within=FREE, between=FREE)


def stack(blocks: int = 8, *, weight: int = 4 * MB, state: int = 2, sizes: tuple[int, ...] = (1, 2, 4)) -> ModelCosts:
    """Equal blocks, each of 1 GFLOP, 10 MB of activations and 4 MB of weights, of which a model axis divides all.
    State takes so many times the bytes of weights."""

    def layers(size: int) -> tuple[LayerCost, ...]:
        return tuple(
            LayerCost(
                name=f"block{number}",
                flops=1e9 / size,
                kept=10 * MB / size,
                kept_recomputed=MB,
                recomputed=True,
                kept_gathered=MB,
                gathers=True,
                sums=(MB, MB) if size > 1 else (),
                forward_sums=(MB,) if size > 1 else (),
                weights=(Weight(index=number, size=weight // size, state=state * weight // size, divided=size > 1),),
            )
            for number in range(blocks)
        )

    crossing = [-1, *[MB] * (blocks - 1)]
    return ModelCosts(
        name="stack", layers={size: layers(size) for size in sizes}, cut_costs=[10**9] * blocks, crossing=crossing
    )


def question(machine: Machine = ROOMY, **changes) -> Question:
    options = {"model": stack(), "batch": 16, "recomputes": ("none",), "shards": ("none",)}
    return Question(**{**options, "machine": machine, **changes})


def on(devices: int = 1, workers: int = 1, **changes) -> Machine:
    return dataclasses.replace(ROOMY, devices=devices, workers=workers, **changes)


def plan(data: int = 1, pipeline: int = 1, model: int = 1, micro_batches: int = 1, **options) -> Plan:
    return Plan(mesh=Mesh(data=data, pipeline=pipeline, model=model), micro_batches=micro_batches, **options)

"""Plans for devices that need not be present, without training: `python -m tfpar.plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar import inputs, models
from tfpar.checkpoint.model_files import task_spec
from tfpar.collectives.cost_model import Link
from tfpar.config import ExperimentConfig
from tfpar.parallel.mesh import AUTO, parse_sizes
from tfpar.parallel.planner.machine import parse_size
from tfpar.parallel.planner.search import Answer, search
from tfpar.process.activity import activity
from tfpar.training.planning.facts import find_facts
from tfpar.training.planning.machines import Given, machine_of
from tfpar.training.planning.question import question_of

_LARGEST_MODEL_AXIS = 16


def model_axis_sizes(devices: int, workers: int, asked: int = 1) -> list[int]:
    """Sizes that the model axis may have, besides 1: divisors of a worker's devices, and whole workers.

    Args:
      devices: Devices of a worker.
      workers: Number of workers.
      asked: The size that the user asks for, which may be larger than those that are considered otherwise.
    """
    within = [size for size in range(2, devices + 1) if devices % size == 0]
    spanning = [devices * count for count in range(2, workers + 1) if workers % count == 0]
    return [size for size in (*within, *spanning) if size <= _LARGEST_MODEL_AXIS or size == asked]


def plan_offline(
    config: ExperimentConfig,
    *,
    hosts: int,
    flops: float,
    between: Link,
    within: Link | None = None,
    fixed: Sequence[str] = (),
    hosts_here: int = 1,
) -> Answer:
    """Makes a plan for workers like the described ones.

    Args:
      config: The experiment: its model, data, batch and options, and `devices` of each worker.
      hosts: Number of workers.
      flops: FLOPs per second of a device; 0: passes are timed here.
      between: The link between the workers.
      within: The link between the devices of a worker; by default that of GPUs, or a CPU's memory if passes are timed.
      fixed: Options that must stay as they are.
      hosts_here: Workers that will share a machine like this one, and its cores.

    Raises:
      ConfigError: Something in the configuration cannot work.
    """
    devices = max(config.strategy.devices, 1)
    train, _ = inputs.build_splits(config.input, config.train.seed)
    build = lambda: models.build(config.model.model, task_spec(train), **config.model.arguments())  # noqa: E731
    models.check_model(config.model.model, task_spec(train), **config.model.arguments())
    mesh = config.strategy.mesh
    sizes = model_axis_sizes(devices, hosts, 1 if mesh == AUTO else parse_sizes(mesh).get("model", 1))
    with activity(f"counting {config.model.model}"):
        facts = find_facts(
            *(build, config, sizes),
            most_examples=0 if flops else config.input.global_batch_size,
            devices=hosts * devices,
            workers_here=hosts_here,
        )
    memory = parse_size(config.strategy.device_memory)
    machine = machine_of(
        *(hosts, devices, "GPU" if flops else "CPU"),
        precision=config.precision.precision,
        measured=facts.measured,
        given=Given(flops=flops, memory=memory, within=within, between=between),
        workers_here=hosts_here,
    )
    if not memory:  # this machine's value does not apply to others
        machine = dataclasses.replace(machine, memory=0)
    if not mesh:
        config = dataclasses.replace(config, strategy=dataclasses.replace(config.strategy, mesh=AUTO))
    given = dict.fromkeys(fixed)
    return search(question_of(config, facts, machine, given=given, kept_examples=getattr(train, "kept_bytes", 0)))

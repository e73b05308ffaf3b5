"""Enumerates plans, predicts their time and memory, and lists the fastest that fit first."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from tfpar.config import ConfigError
from tfpar.parallel.mesh import Mesh, parse_mesh
from tfpar.parallel.planner.costs import ModelCosts
from tfpar.parallel.planner.machine import Machine, format_size
from tfpar.parallel.planner.memory import memory_of
from tfpar.parallel.planner.plan import Plan, Prediction
from tfpar.parallel.planner.stages import Replica, replica_of
from tfpar.parallel.planner.step_time import DENSE, Exchange, step_time

# With more micro-batches per stage than this, a pipeline has almost no bubble left.
_MOST_TURNS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """The input of a search.

    Attributes:
      model: The model.
      machine: Devices and links.
      batch: Number of examples of a step, over all replicas.
      uneven_batches: Whether a run takes a batch that replicas and micro-batches do not divide.
      outer_per_weight: Bytes of outer weights and their optimizer's state per float32 weight, with local steps.
      recomputes: Values of `--recompute` to consider.
      shards: Values of `--shard` to consider.
      exchanges: Exchanges to consider.
      micro_batches: Number of micro-batches; 0 lets the search choose it.
      meshes: Required sizes of the mesh, by axis.
      schedule: Schedule of a pipeline, `1f1b`, `eager_1f1b` or `gpipe`.
      stages_per_device: Number of stages per device of a pipeline.
      stage_balance: The quantity that stages share equally, a value of `--stage_balance`.
      compiled: Whether XLA compiles passes where it can.
      compiles_update: Whether XLA compiles the update where it can.
      in_groups: Whether the optimizer updates weights in groups without XLA.
      batches: Batches of a replica that exist at once: prepared, next, and current.
      kept_examples: Bytes that the source of the examples keeps in the memory of each worker.
      refusal: Returns the reason why a plan cannot be carried out; an empty string if it can.
    """

    model: ModelCosts
    machine: Machine
    batch: int
    uneven_batches: bool = False
    outer_per_weight: int = 0
    recomputes: Sequence[str] = ("none", "blocks")
    shards: Sequence[str] = ("none", "optimizer")
    exchanges: Sequence[Exchange] = (DENSE,)
    micro_batches: int = 0
    meshes: dict[str, int] = dataclasses.field(default_factory=dict)
    schedule: str = "1f1b"
    stages_per_device: int = 1
    stage_balance: str = "flops"
    compiled: bool = True
    compiles_update: bool = True
    in_groups: bool = True
    batches: int = 0
    kept_examples: int = 0
    refusal: Callable[[Plan], str] = lambda plan: ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a search.

    Attributes:
      question: The input of the search.
      fitting: The plans that fit, the fastest first.
      others: The plans that do not fit, the smallest first.
      refused: Why a run would refuse a plan, if it would refuse all of them.
    """

    question: Question
    fitting: list[Prediction]
    others: list[Prediction]
    refused: str = ""

    @property
    def best(self) -> Prediction:
        """The fastest plan that fits.

        Raises:
          ConfigError: No plan fits; the message says what would help.
        """
        if self.fitting:
            return self.fitting[0]
        machine = self.question.machine
        where = f"{machine.workers} x {machine.devices} devices"
        if not self.others:
            raise ConfigError(
                f"--mesh: there is no plan for {self.question.model.name!r} with "
                f"--global_batch_size={self.question.batch} on {where}. {self._obstacles()}"
            )
        least = self.others[0]
        raise ConfigError(
            f"--mesh: {self.question.model.name!r} does not fit on {where} with "
            f"--device_memory={format_size(machine.memory)}: the smallest of {len(self.others)} plans "
            f"({describe(least.plan)}) needs {format_size(least.memory.size)} a device, {composition(least)}. Use more "
            "devices, a smaller --global_batch_size, or an optimizer with less state."
        )

    def _obstacles(self) -> str:
        machine = self.question.machine
        needed, there = math.prod(self.question.meshes.values()), machine.workers * machine.devices
        if there % needed:
            axes = ",".join(f"{name}:{size}" for name, size in self.question.meshes.items())
            return (
                f"{axes} needs {needed} devices, or a multiple of them: use other sizes, or another number of devices."
            )
        if self.refused:
            return f"A run would refuse all of them, for example: {self.refused}"
        model = self.question.model
        found = [*meshes(machine, sorted(model.layers), self.question.meshes)]
        if found and not any(_micro_batches(self.question, mesh) for mesh in found):
            fixed = self.question.micro_batches
            parts = f"replicas x --accumulate_steps={fixed}" if fixed else "replicas"
            return f"No mesh has {parts} by which the batch is divisible: use another batch, or --uneven_batches=true."
        reasons = [model.uncut, *model.undivided.values()]
        return " ".join(filter(None, reasons[:2])) or "Use another number of devices, or another batch."


def search(question: Question) -> Answer:
    """Predicts time and memory of every plan.

    Args:
      question: The input of the search.
    """
    laid_out = functools.cache(functools.partial(_laid_out, question))
    found, refused = [], ""
    for plan, exchange in _plans(question):
        replica = laid_out(plan.mesh)
        if replica is not None and not (reason := question.refusal(plan)):
            found.append(predict(question, plan, exchange, replica))
        elif replica is not None:
            refused = refused or reason
    fits = [each for each in found if each.fits]
    fastest = min((each.time.seconds for each in fits), default=0.0)
    fitting = sorted(fits, key=functools.partial(_order, fastest))
    others = sorted((each for each in found if not each.fits), key=lambda each: each.memory.size)
    return Answer(question, fitting, others, "" if found else refused)


def predict(question: Question, plan: Plan, exchange: Exchange, replica: Replica) -> Prediction:
    """Predicts time and memory of one plan.

    Args:
      question: The input of the search.
      plan: The plan.
      exchange: The exchange of the plan.
      replica: The stages of the model on the plan's mesh.
    """
    if exchange.among:
        each_way = [predict(question, plan, each, replica) for each in exchange.among]
        return min(each_way, key=lambda each: each.time.seconds)
    machine, examples = question.machine, -(-question.batch // (plan.mesh.data * plan.micro_batches))
    time = step_time(replica, plan, machine, examples, exchange, question.schedule)
    memory = memory_of(
        *(replica, plan, machine, examples),
        outer_per_weight=question.outer_per_weight,
        remembers=exchange.remembers,
        schedule=question.schedule,
        compiled=question.compiled,
        compiles_update=question.compiles_update,
        in_groups=question.in_groups,
        inputs=_inputs(question, plan, examples),
    )
    return Prediction(plan=plan, time=time, memory=memory, fits=not machine.memory or memory.size <= machine.memory)


def _inputs(question: Question, plan: Plan, examples: int) -> int:
    """Returns the bytes of the input pipeline on a device: of its batches, and on a CPU of what its source keeps.

    Args:
      question: The input of the search.
      plan: The plan.
      examples: Number of examples in a micro-batch on a replica.
    """
    machine = question.machine
    batches = question.batches * question.model.example * examples * plan.micro_batches
    if not machine.shares_memory:
        return batches
    local = max(1, machine.devices // plan.mesh.devices_of_replica)
    return (local * batches + question.kept_examples) // machine.devices


def predict_plan(question: Question, plan: Plan) -> Prediction:
    """`predict` for a plan with one of the exchanges of a question.

    Raises:
      ConfigError: The model cannot be divided in this way.
    """
    exchange = next((each for each in question.exchanges if each.name == plan.exchange), DENSE)
    replica = _laid_out(question, plan.mesh)
    if replica is None:
        model = question.model
        reason = model.undivided.get(plan.mesh.model) or model.uncut or "It has too few layers for so many stages."
        raise ConfigError(f"--mesh={plan.mesh_text}: {model.name!r} cannot be divided in this way. {reason}")
    return predict(question, plan, exchange, replica)


def _laid_out(question: Question, mesh: Mesh) -> Replica | None:
    spans = mesh.pipeline > 1 and mesh.devices_of_replica > question.machine.devices
    here = max(1, question.machine.devices // mesh.model) if spans else 0
    return replica_of(question.model, mesh, question.stages_per_device, question.stage_balance, here=here)


def meshes(machine: Machine, sizes: Sequence[int], wanted: dict[str, int] | None = None) -> Iterator[Mesh]:
    """Yields all meshes of a machine's devices that `--mesh` accepts.

    Args:
      machine: The machine.
      sizes: Sizes that the model axis may have.
      wanted: Required sizes of the mesh, by axis.
    """
    total = machine.all_devices
    for model, pipeline in itertools.product(sizes, range(1, total + 1)):
        if total % (model * pipeline):
            continue
        mesh = Mesh(data=total // (model * pipeline), pipeline=pipeline, model=model)
        if any(getattr(mesh, axis) != size for axis, size in (wanted or {}).items()):
            continue
        try:
            yield parse_mesh(Plan(mesh=mesh).mesh_text, workers=machine.workers, devices=machine.devices)
        except ConfigError:  # a replica must consist of whole workers or fit in one
            continue


def _plans(question: Question) -> Iterator[tuple[Plan, Exchange]]:
    for mesh in meshes(question.machine, sorted(question.model.layers), question.meshes):
        exchanges = question.exchanges if mesh.data > 1 else question.exchanges[:1]
        for micro_batches, recompute, shard, exchange in itertools.product(
            _micro_batches(question, mesh), question.recomputes, question.shards, exchanges
        ):
            if shard == "none" or mesh.data > 1:
                how = Plan(mesh=mesh, micro_batches=micro_batches, recompute=recompute, shard=shard)
                yield dataclasses.replace(how, exchange=exchange.name), exchange


def _micro_batches(question: Question, mesh: Mesh) -> list[int]:
    """Returns the numbers of micro-batches to consider, which a run takes: the required one, or powers of two."""
    share = question.batch // mesh.data
    most = min(share, _MOST_TURNS * mesh.pipeline) if mesh.pipeline > 1 else share
    numbers = [question.micro_batches] if question.micro_batches else [1 << power for power in range(most.bit_length())]
    return [each for each in numbers if question.uneven_batches or question.batch % (mesh.data * each) == 0]


def _order(fastest: float, prediction: Prediction) -> tuple[float, ...]:
    """Returns a sort key: the fastest plans first, and among those within 2 % the simplest.

    No prediction can distinguish plans whose times are that close.

    Args:
      fastest: Seconds of the fastest plan, from which on plans are put together by steps of 2 %.
      prediction: The prediction of a plan.
    """
    plan, seconds = prediction.plan, prediction.time.seconds
    changes = (plan.recompute != "none") + (plan.shard != "none")
    slower = int(math.log(seconds / fastest, 1.02))
    return slower, plan.mesh.devices_of_replica, changes, plan.micro_batches, seconds


def check_fits(question: Question, plan: Plan) -> Prediction:
    """Refuses a plan that needs more than a device has.

    Args:
      question: The input of the search; the error message proposes alternatives from it.
      plan: The chosen plan.

    Returns:
      The prediction for the plan.

    Raises:
      ConfigError: The plan does not fit; the message lists options with which it would.
    """
    found = predict_plan(question, plan)
    if found.fits:
        return found
    given = plan.options()
    remedies: dict[frozenset[str], str] = {}  # keyed by the options that change: one suggestion per set of options
    for other in sorted(search(question).fitting, key=lambda each: len(_changes(given, each.plan))):
        changes = _changes(given, other.plan)
        if not any(names <= changes.keys() for names in remedies):
            remedies[frozenset(changes)] = " ".join(f"--{name}={value}" for name, value in changes.items())
    ways = "; or ".join([*remedies.values()][:4])
    raise ConfigError(
        f"--device_memory={format_size(question.machine.memory)}: {describe(plan)} needs "
        f"{format_size(found.memory.size)} a device, {composition(found)}. "
        + (f"It fits with {ways}." if ways else "No known option would make it fit on these devices.")
    )


def _changes(given: dict[str, object], plan: Plan) -> dict[str, object]:
    return {name: value for name, value in plan.options().items() if given[name] != value}


def composition(prediction: Prediction) -> str:
    """Describes the parts of a device's memory, the largest first."""
    parts = sorted(prediction.memory.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{format_size(size)} {name}" for name, size in parts if size)


def describe(plan: Plan) -> str:
    """Describes the options of a plan that differ from their defaults."""
    idle = {"accumulate_steps": 1, "recompute": "none", "shard": "none", "exchange": "none"}
    return " ".join(f"--{name}={value}" for name, value in plan.options().items() if idle.get(name) != value)

"""Measures a device's speed in passes of a model and in updates of its weights, and the memory that XLA uses."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpar.models import graph_cost
from tfpar.models.peak import peak_flops
from tfpar.optim.keras_draws import drawing
from tfpar.optim.optimizers import ELEMENTWISE, build_for_some
from tfpar.optim.pure_update import pure_apply
from tfpar.parallel.planner.costs import ModelCosts
from tfpar.parallel.planner.machine import OPS, PROGRAM, STAGES, Machine, Point, Rates
from tfpar.process.cores import cores
from tfpar.training.pipeline.passes import CompiledPasses, Passes, TapedPasses

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)

_PASSES = 3  # FLOPs of a step over those of the forward pass
_REPEATS, _ENOUGH_S = 3, 1.0  # calls that are timed, unless fewer take this long
_SLOW_S, _LONGEST_S = 0.5, 2.0  # a pass of one example that is long enough; the longest of several, about
_BUDGET_S = 60.0  # seconds after which no other way is timed, and nothing else compiled
_MOST_EXAMPLES, _LENGTH = 256, 64
_MOST_KEPT = 1 << 30  # bytes of activations of a pass that is timed
_Times = tuple[float, float]  # seconds, and processor seconds of all cores
_LARGE = (2048, 2048)  # shape of the weight whose update is timed: with its gradient, larger than most caches


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements on one device.

    Attributes:
      rates: Rates of passes and updates.
      fused: Bytes of activations that an XLA program of both passes holds, as a fraction of those that the graph keeps,
        by the number of examples, on which it depends. Empty if that is not known.
      fused_in_stages: The same of the passes of a stage, of which the first is a program of its own; 0 if not known.
      fleeting: What the program of the backward pass holds beside, as `fused`.
    """

    rates: Rates
    fused: Mapping[int, float] = dataclasses.field(default_factory=dict)
    fused_in_stages: float = 0.0
    fleeting: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def flops(self) -> float:
        """FLOPs per second of the largest passes."""
        largest = (self.rates.passes.get(PROGRAM) or self.rates.passes[OPS])[-1]
        return largest.examples / largest.seconds

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Measured:
        """The measurements, from the JSON of `dataclasses.asdict(measured)`."""
        rates = value["rates"]
        passes = {way: [Point(*point) for point in points] for way, points in rates["passes"].items()}
        fractions = {
            name: {int(examples): fraction for examples, fraction in value[name].items()}
            for name in ("fused", "fleeting")
        }
        return cls(**{**value, **fractions, "rates": Rates(**{**rates, "passes": passes})})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What is measured, and with how much.

    Attributes:
      examples: Examples of the largest micro-batch.
      share: Examples of a batch on a device that has the whole model.
      length: Length of dimensions of inputs that are not known.
      memory: Bytes that activations may take.
      stages: Whether there may be pipelines.
      reports: Whether XLA may be made to report its memory: in a process that has not used it before, and that ends
        afterwards, because XLA goes on reporting.
    """

    examples: int
    share: int
    length: int
    memory: int
    stages: bool
    reports: bool


def measure(
    model: keras.Model,
    costs: ModelCosts,
    optimizer: keras.optimizers.Optimizer,
    limits: Limits,
    *,
    compiled: bool,
    compiles_update: bool,
) -> Measured | None:
    """Times passes of a few and of more examples, and an update.

    A large model takes about a minute, and as long as one more way to run takes to compile and to run twice.

    Args:
      model: A built model with symbolic inputs.
      costs: From `count_model`.
      optimizer: An unbuilt optimizer. It is built for another weight.
      limits: See `Limits`.
      compiled: Whether XLA compiles passes where it can.
      compiles_update: Whether XLA compiles updates where it can.

    Returns:
      The measurements; None if the activations of one example take too much memory, or passes fail.
    """
    kept, flops = sum(layer.kept for layer in costs.whole), _PASSES * costs.flops
    if kept > limits.memory or not flops:
        return None
    most = min(_MOST_EXAMPLES, limits.examples, int(max(kept, min(_MOST_KEPT, limits.memory)) / max(kept, 1.0)))
    ways = [OPS, PROGRAM, *([STAGES] if costs.crossing and limits.stages else [])] if compiled else [OPS]
    passes: dict[str, list[Point]] = {}
    memory: dict[str, Any] = {}
    deadline = time.perf_counter() + _BUDGET_S
    with _reported(compiled and limits.reports) as temporaries:
        for way in ways:
            if passes and time.perf_counter() > deadline:
                break
            step = _step(model, way)
            try:
                times, held = _timed_passes(step, model, most, limits.length, temporaries)
            except Exception as error:  # of the model, or of XLA
                _log.warning("a pass could not be timed (%s): %s", way, str(error).partition("\n")[0])
                break
            passes[way] = [Point(each, took / flops, busy / flops) for each, (took, busy) in times.items()]
            if way == PROGRAM and kept:
                # What XLA fuses depends on the number of examples.
                if limits.reports and limits.share not in held and time.perf_counter() < deadline:
                    _compile(step, model, limits.share, limits.length)
                    held[limits.share] = temporaries()
                memory["fused"] = _fractions(held, kept)
            if way == STAGES and kept:
                by_stages, last = _kept_by(step), passes[way][-1].examples
                memory["fused_in_stages"] = 1.0 if by_stages is None else by_stages / (kept * last)
                memory["fleeting"] = _fractions(held, kept)
        updates, adding = _memory_rates(optimizer, model, [PROGRAM, OPS] if compiles_update else [OPS])
    return Measured(Rates(passes=passes, updates=updates, adding=adding), **memory) if passes else None


def _fractions(held: Mapping[int, int], kept: float) -> dict[int, float]:
    """Bytes, by the number of examples, as fractions of those that the graph keeps for an example."""
    return {examples: size / (kept * examples) for examples, size in sorted(held.items()) if size}


def assumed(precision: str) -> Measured:
    """Rates of a CPU on which nothing could be timed but a matrix product."""
    flops, memory = peak_flops(precision).flops, Machine().memory_bandwidth
    points = [Point(1, 1 / flops, cores() / flops)]
    return Measured(Rates(passes={OPS: points}, updates={OPS: memory}, adding=memory))


def seconds_of_pass(model: keras.Model, examples: int, *, compiled: bool) -> float:
    """Seconds of a forward and backward pass, the fastest of a few.

    Args:
      model: A built model with symbolic inputs; dimensions that are not known have length 64.
      examples: Number of examples.
      compiled: Whether XLA compiles the pass.
    """
    return _timed(_step(model, PROGRAM if compiled else OPS), model, examples, _LENGTH)[0]


def _timed_passes(
    step: Callable[..., Any], model: keras.Model, most: int, length: int, temporaries: Callable[[], int]
) -> tuple[dict[int, _Times], dict[int, int]]:
    """Passes of one example, of as many as do not take too long, and of a number between: small matrices are slower
    than large ones. Also the temporaries of each."""
    held: dict[int, int] = {}

    def timed(examples: int) -> _Times:
        took = _timed(step, model, examples, length)
        held[examples] = temporaries()
        return took

    times = {1: timed(1)}
    if times[1][0] > _SLOW_S:
        return times, held
    many = min(most, max(2, int(_LONGEST_S / times[1][0])))
    for examples in sorted({math.isqrt(many) if many > 4 else many, many} - {1}):
        # Noise may make a larger batch seem free.
        found = [*times.values(), timed(examples)]
        times[examples] = max(took for took, _ in found), max(busy for _, busy in found)
    return times, held


def _compile(step: Any, model: keras.Model, examples: int, length: int) -> None:
    """Compiles a pass of so many examples, without running it."""
    program = step.experimental_get_compiler_ir(*_arguments(model, examples, length))
    # Without its argument `device_name`, of which TensorFlow 2.21 warns, it takes the device of new operations.
    with tf.device("CPU:0"):
        program(stage="optimized_hlo_serialized")


def _step(model: keras.Model, way: str) -> Callable[..., Any]:
    """A forward and backward pass: `(inputs, weights, state) -> (loss, gradients)`."""
    if way == STAGES:
        return tf.function(_StagePasses(model), autograph=False)

    def step(inputs: Any, weights: Any, state: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = _loss(model, inputs, weights, state)
        return loss, [each for each in tape.gradient(loss, weights) if each is not None]

    return tf.function(step, autograph=False, jit_compile=True if way == PROGRAM else None)


def _kept_by(step: Any) -> int | None:
    """`_StagePasses.kept` of `_step(model, STAGES)`."""
    kept: int | None = step.python_function.kept
    return kept


class _StagePasses:
    """A forward and backward pass like `_step`'s, as those of the only stage of a pipeline.

    Args:
      model: The model.

    Attributes:
      kept: Bytes that the forward pass, as it was traced last, keeps for the backward pass. None if it keeps all.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.kept: int | None = None

    def __call__(self, inputs: Any, weights: Any, state: Any) -> Any:
        tensors = [*inputs, *weights, *state]

        def body(*given: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(given)
            parts = [[next(rest) for _ in part] for part in (inputs, weights, state)]
            return [_loss(self._model, *parts)]

        watched = range(len(inputs), len(inputs) + len(weights))
        compiled = CompiledPasses(body, tensors, recompute=False, watched=watched)
        passes: Passes = compiled
        self.kept = None
        if compiled.can_run:
            self.kept = sum((each.shape.num_elements() or 0) * each.dtype.size for each in compiled.kept)
        else:
            program = tf.function(body, autograph=False, jit_compile=True)
            passes = TapedPasses(lambda given: program(*given), recompute=False, watched=watched)
        (loss,), kept = passes.forward(tensors)
        return loss, [each for each in passes.backward(tensors, kept, [tf.ones_like(loss)]) if each is not None]


def _loss(model: keras.Model, inputs: Any, weights: Any, state: Any) -> tf.Tensor:
    structured = graph_cost.in_structure(model, inputs)
    with drawing():
        outputs, _ = model.stateless_call(weights, state, structured, training=True)
    return graph_cost.stand_in_loss(outputs)


def _timed(step: Callable[..., Any], model: keras.Model, examples: int, length: int) -> _Times:
    """The fastest of a few passes."""
    arguments = _arguments(model, examples, length)
    return _fastest(lambda: step(*arguments)[0])


def _arguments(model: keras.Model, examples: int, length: int) -> tuple[list[tf.Tensor], ...]:
    """The arguments of `_step`: inputs of zeros, weights, and state."""
    shapes = [[examples, *(size or length for size in tensor.shape[1:])] for tensor in model.inputs]
    inputs = [tf.zeros(shape, tensor.dtype) for shape, tensor in zip(shapes, model.inputs, strict=True)]
    weights, state = (
        [tf.convert_to_tensor(each) for each in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )
    return inputs, weights, state


def _fastest(call: Callable[[], tf.Tensor]) -> _Times:
    """The fastest of a few calls, after a first one, in which it is traced and compiled."""

    def timed() -> _Times:
        began, worked = time.perf_counter(), time.process_time()
        call().numpy()
        return time.perf_counter() - began, time.process_time() - worked

    call().numpy()
    taken: list[_Times] = []
    while len(taken) < _REPEATS and sum(seconds for seconds, _ in taken) < _ENOUGH_S:
        taken.append(timed())
    return min(taken)


def _memory_rates(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, ways: Sequence[str]
) -> tuple[dict[str, float], float]:
    """`Rates.updates` and `Rates.adding`.

    Args:
      optimizer: An unbuilt optimizer. If it is not elementwise, the rate of one weight says nothing of others, and the
        rate of adding is assumed.
      model: The model that it is for.
      ways: How updates run.
    """
    gradient, other = tf.fill(_LARGE, 1e-3), tf.fill(_LARGE, 2e-3)
    size = 4 * math.prod(_LARGE)
    add = tf.function(tf.add)
    adding = 3 * size / _fastest(lambda: add(gradient, other)[0, 0])[0]
    if type(optimizer) not in ELEMENTWISE:
        return dict.fromkeys(ways, adding), adding
    weight = keras.Variable(tf.ones(_LARGE), name="kernel")
    build_for_some(optimizer, [weight], model.trainable_variables)
    variables = [weight.value, *(each.value for each in optimizer.variables)]
    touched = size + sum(2 * each.dtype.size * each.shape.num_elements() for each in variables)

    def update() -> None:
        old, *state = (each.read_value() for each in variables)
        new = itertools.chain(*pure_apply(optimizer, state, [old], [gradient]))
        for variable, value in zip(variables, new, strict=True):
            variable.assign(value, read_value=False)

    def rate(way: str) -> float:
        program = tf.function(update, autograph=False, jit_compile=True if way == PROGRAM else None)

        def call() -> tf.Tensor:
            program()
            return weight.value[0, 0]

        return touched / _fastest(call)[0]

    return {way: rate(way) for way in ways}, adding


@contextlib.contextmanager
def _reported(reports: bool) -> Iterator[Callable[[], int]]:
    """In this context XLA reports its programs; the yielded function returns the most temporaries, in bytes, of one
    that was compiled since the last call."""
    if not reports:
        yield lambda: 0
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = os.environ.get("XLA_FLAGS", "")
        # XLA reads this variable once per process, at the first use of XLA (TensorFlow 2.21).
        os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*"
        seen: set[Path] = set()

        def temporaries() -> int:
            new = {*Path(folder).glob("*buffer-assignment.txt")} - seen
            seen.update(new)
            return max(map(_temporaries, new), default=0)

        try:
            yield temporaries
        finally:
            os.environ["XLA_FLAGS"] = flags


def _temporaries(report: Path) -> int:
    """Bytes of XLA's preallocated temporaries, from its report on the assignment of buffers."""
    found = re.findall(r"^allocation \d+: .*size (\d+),.* preallocated-temp", report.read_text(), re.MULTILINE)
    return sum(map(int, found))

"""`--jit_segments=auto`: how many programs a pass is cut into, from measured times and the cost model of the exchange.

More programs expose less of the exchange, because the buckets of the last layers are sent while the gradients of the
first layers are computed. Each program costs its launch, and the tensors at its borders pass through memory, which
fusion in XLA would have avoided.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence

from tfpar import models
from tfpar.collectives import cost_model
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.cost_model import NOTHING, Cost
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ExperimentConfig
from tfpar.exchange import spec as specs
from tfpar.exchange.spec import Spec
from tfpar.exchange.tuning.forecast import Forecast, Sent, forecast
from tfpar.optim import keras_calls
from tfpar.parallel import strategies
from tfpar.parallel.pipeline.cuts import cut_evenly
from tfpar.training.model.xla import is_convolutional, xla_obstacle
from tfpar.training.pipeline.graph import costs_of, crossing_elements, steps_of
from tfpar.training.planning.measuring import seconds_of_pass
from tfpar.training.segments.check import model_obstacle, obstacle

import keras
import tensorflow as tf

_TRIED = (1, 2, 3, 4, 6, 8, 12)
_LEAST_GAIN = 0.03  # of a step: less is not worth a program
_MOST_EXAMPLES = 64  # in the measured pass
_CHAIN = 16  # programs in the measurement of a launch
_FORWARD = 1 / 3  # of the FLOPs of forward and backward pass


@dataclasses.dataclass(frozen=True)
class Profile:
    """The values that the choice depends on.

    Attributes:
      flops: FLOPs of the steps of the model's graph, in order.
      crossing: Bytes that cross a cut before each step, in one pass; negative where no cut is allowed.
      ready: For each bucket, the first step whose variables are in it: the bucket is complete after the backward pass
        of this step.
      costs: The cost of each bucket.
      pass_seconds: Seconds of a forward and backward pass in one program.
      launch_seconds: Seconds to launch a program.
      copying: Bytes per second that the device writes or reads.
    """

    flops: Sequence[int]
    crossing: Sequence[int]
    ready: Sequence[int]
    costs: Sequence[Cost]
    pass_seconds: float
    launch_seconds: float
    copying: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen number of segments.

    Attributes:
      segments: Programs that each pass is cut into; 1: forward and backward pass are one program.
      reason: The reason, as text.
    """

    segments: int
    reason: str


def choose_segments(profile: Profile) -> Choice:
    """The number of segments with the shortest predicted step, the smallest one among equals."""
    predicted = {number: seconds for number in _TRIED if (seconds := added_seconds(profile, number)) is not None}
    step = profile.pass_seconds + predicted[1]
    best = min(predicted, key=lambda number: predicted[number] + _LEAST_GAIN * step * (number > 1))
    table = ", ".join(f"{number}: {1e3 * seconds:.1f}" for number, seconds in predicted.items())
    return Choice(
        best,
        f"pass of {1e3 * profile.pass_seconds:.1f} ms, exchange of "
        f"{1e3 * cost_model.together(profile.costs).seconds:.1f} ms; predicted ms of exposed exchange and of launching "
        f"programs, by segments: {table}",
    )


def added_seconds(profile: Profile, segments: int) -> float | None:
    """Seconds that exchange and launches add to a pass in `segments` programs; None if there are too few layers."""
    if segments == 1:
        return cost_model.exposed_seconds([cost_model.together(profile.costs)], [profile.pass_seconds])
    cuts = cut_evenly(profile.flops, profile.crossing.__getitem__, segments)
    if cuts is None:
        return None
    bounds, total = [0, *cuts, len(profile.flops)], sum(profile.flops)
    costs, computing = [NOTHING], [_FORWARD * profile.pass_seconds]
    for start, end in reversed(list(itertools.pairwise(bounds))):
        done = [cost for cost, place in zip(profile.costs, profile.ready, strict=True) if start <= place < end]
        costs.append(cost_model.together(done))
        share = sum(profile.flops[start:end]) / max(1, total)
        computing.append((1.0 - _FORWARD) * profile.pass_seconds * share)
    # A tensor at a cut and its gradient are each written by one program and read by another.
    moved = 4 * sum(profile.crossing[cut] for cut in cuts)
    own = (2 * segments - 1) * profile.launch_seconds + moved / profile.copying
    return cost_model.exposed_seconds(costs, computing) + own


def chosen_for(model: keras.Model, config: ExperimentConfig, runtime: strategies.Runtime) -> Choice:
    """Measures and chooses. All workers call it together, in the scope of the strategy, and get the same result."""
    if why := _why_one(model, config, runtime):
        return Choice(1, why)
    topology, shapes = runtime.topology, [tf.TensorShape(each.shape) for each in model.trainable_variables]
    spec = specs.parse(config.exchange.exchange)
    device = runtime.strategy.extended.worker_devices[0]
    found = forecast(spec, shapes, world_group(topology.workers, topology.worker, device), device)
    if why := why_too_few(spec, shapes, found.sent):
        return Choice(1, why)
    agreement = WorkerAgreement(world_group(topology.workers, topology.worker))
    examples = max(1, config.input.global_batch_size // topology.replicas)
    own = _pass_seconds(model, examples), _launch_seconds()
    pass_seconds, launch_seconds = map(agreement.mean, own)
    profile = _profile(
        model,
        found,
        workers=topology.workers,
        examples=examples,
        pass_seconds=pass_seconds,
        launch_seconds=launch_seconds,
    )
    return choose_segments(profile)


def _why_one(model: keras.Model, config: ExperimentConfig, runtime: strategies.Runtime) -> str:
    """Why nothing needs to be measured; empty if measurements are needed."""
    topology, train = runtime.topology, config.train
    if topology.workers == 1:
        return "a single worker exchanges nothing over a network"
    if why := obstacle(config, topology):
        return why.reason
    if why_not := xla_obstacle(model, replicas=topology.replicas, deterministic=train.deterministic):
        return f"without XLA, the exchange overlaps the backward pass anyway ({why_not})"
    on_cpu = train.jit_compile == "auto" and topology.device_type == "CPU"
    if on_cpu and is_convolutional(model, lambda: models.describe(model)):
        return "without XLA, which is slow in convolutions on CPUs, the exchange overlaps the backward pass anyway"
    if why := model_obstacle(model):
        return f"the model {why.reason}"
    return _why_nothing_overlaps(specs.parse(config.exchange.exchange))


def _why_nothing_overlaps(spec: Spec) -> str:
    options = spec.options
    if spec.compresses and not (options.overlap and options.sends_only_gradient and not options.warmup_steps):
        return f"--exchange={spec.text} sends nothing before all gradients are complete"
    return ""


def why_too_few(spec: Spec, shapes: Sequence[tf.TensorShape], sent: Sequence[Sent]) -> str:
    """Why an exchange has too few buckets to send one before the decision to apply the step; empty if it has enough.

    Args:
      spec: The exchange, before `auto` has chosen. A bucket that it has left dense overlaps like any other.
      shapes: Static shapes of the tensors.
      sent: The buckets. That of the small tensors waits for the decision, because it is sent with the sidecar.
    """
    large = sum(spec.options.is_compressible(shapes[bucket.indices[0]]) for bucket in sent)
    if not spec.compresses or large > 1:
        return ""
    return f"the exchange has {('no bucket', 'one bucket')[large]} of large tensors, and needs two to overlap"


def _profile(
    model: keras.Model, found: Forecast, *, workers: int, examples: int, pass_seconds: float, launch_seconds: float
) -> Profile:
    graph = keras_calls.graph_of(model)
    steps = steps_of(graph)
    costs = costs_of(model, graph, steps)
    width = examples * tf.as_dtype(model.compute_dtype).size
    first: dict[int, int] = {}  # step that reads a variable first, by the identity of the variable
    for number, step in enumerate(steps):
        for variable in step.variables:
            first.setdefault(id(variable), number)
    return Profile(
        flops=costs.flops,
        crossing=[max(-1, each * width) for each in crossing_elements(graph, steps, costs)],
        ready=_ready([id(variable) for variable in model.trainable_variables], first, found),
        costs=found.costs(workers),
        pass_seconds=pass_seconds,
        launch_seconds=launch_seconds,
        copying=found.copying.decode,
    )


def _ready(variables: Sequence[int], first: Mapping[int, int], found: Forecast) -> list[int]:
    return [min(first.get(variables[index], 0) for index in bucket.indices) for bucket in found.sent]


def _pass_seconds(model: keras.Model, examples: int) -> float:
    """Seconds of a forward and backward pass of one replica's examples, in one program."""
    tried = min(examples, _MOST_EXAMPLES)
    return seconds_of_pass(model, tried, compiled=True) * examples / tried


def _launch_seconds() -> float:
    """Seconds that an XLA program takes in addition to what it computes, within a function."""

    program = tf.function(lambda value: value * 1.5 + 1.0, autograph=False, jit_compile=True)

    def chain(value: tf.Tensor) -> tf.Tensor:
        for _ in range(_CHAIN):
            value = program(value)
        return value

    values = tf.zeros([256])
    function = tf.function(chain, autograph=False).get_concrete_function(values)
    function(values)
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        function(values)
        taken.append(time.perf_counter() - began)
    return min(taken) / _CHAIN

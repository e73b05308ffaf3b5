"""Measures a device's speed in passes of a model and in updates of its weights, and the memory that XLA uses."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfpar.models import graph_cost
from tfpar.optim.pure_update import pure_apply
from tfpar.parallel.planner.costs import ModelCosts
from tfpar.parallel.planner.machine import Rates

import keras
import tensorflow as tf

_PASSES = 3  # FLOPs of a step over those of the forward pass
_LONG_ENOUGH_S = 0.3
_REPEATS = 3
_MOST_EXAMPLES = 256
_MOST_KEPT = 1 << 30  # bytes of activations of a pass that is timed
_LARGE = (2048, 2048)  # shape of the weight whose update is timed: with gradient and state, larger than caches


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements on one device.

    Attributes:
      rates: If XLA compiles passes, or updates, those of compiled ones.
      by_op: The rates without XLA, if XLA compiles any of them.
      fused: Bytes of activations that XLA holds, as a fraction of those that the graph keeps; 0 without XLA.
    """

    rates: Rates
    by_op: Rates | None = None
    fused: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs per second of the largest passes."""
        examples, seconds = self.rates.passes[-1]
        return examples / seconds

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Measured:
        """The measurements, from the JSON of `dataclasses.asdict(measured)`."""
        by_op = value["by_op"]
        return cls(_rates(value["rates"]), by_op and _rates(by_op), value["fused"])


def _rates(value: dict[str, Any]) -> Rates:
    return Rates(**{**value, "passes": tuple(map(tuple, value["passes"]))})


def measure(
    model: keras.Model,
    costs: ModelCosts,
    optimizer: keras.optimizers.Optimizer,
    most: int,
    *,
    compiled: bool,
    compiles_update: bool,
) -> Measured:
    """Times passes of a few and of more examples, and an update, some seconds in all.

    Args:
      model: A built model with symbolic inputs; dimensions that are not known have length 64.
      costs: From `count_model`.
      optimizer: An unbuilt optimizer. It is built for another weight.
      most: Examples of the largest micro-batch to try.
      compiled: Whether XLA compiles passes. XLA reports memory only in a process that has not used it before.
      compiles_update: Whether XLA compiles updates.
    """
    kept = sum(layer.kept for layer in costs.whole)
    most = max(1, min(most, int(_MOST_KEPT / max(kept, 1.0))))
    with _reported(compiled) as temporaries:
        passes = _timed_passes(model, costs, most, compiled=compiled)
        held = temporaries()
        bandwidth = _update_bandwidth(optimizer, (True, False) if compiles_update else (False,))
    by_op = None
    if compiled or compiles_update:
        own = _timed_passes(model, costs, most, compiled=False) if compiled else passes
        by_op = Rates(passes=own, update_bandwidth=bandwidth[-1])
    rates = Rates(passes=passes, update_bandwidth=bandwidth[0])
    return Measured(rates, by_op, held / (kept * passes[-1][0]) if kept else 0.0)


def _timed_passes(model: keras.Model, costs: ModelCosts, most: int, *, compiled: bool) -> tuple[tuple[int, float], ...]:
    """`Rates.passes` for one example, as many as take long enough, and between: small matrices are slower than large
    ones."""
    step = _step(model, compiled=compiled)
    many = min(most, _MOST_EXAMPLES)
    seconds = {1: _seconds(step, model, 1)}
    if seconds[1] > _LONG_ENOUGH_S:
        many = min(many, 4)
    elif seconds[1] * many > 8 * _LONG_ENOUGH_S:
        many = max(2, int(8 * _LONG_ENOUGH_S / seconds[1]))
    for examples in sorted({math.isqrt(many) if many > 4 else many, many} - {1}):
        # Noise may make a larger batch seem free.
        seconds[examples] = max(_seconds(step, model, examples), *seconds.values())
    return tuple((examples, took / (_PASSES * costs.flops)) for examples, took in seconds.items())


def _update_bandwidth(optimizer: keras.optimizers.Optimizer, ways: Sequence[bool]) -> list[float]:
    """Bytes per second that an update reads and writes: gradient, weight and state, the last two twice.

    Args:
      optimizer: An unbuilt optimizer.
      ways: For each result, whether XLA compiles the update.
    """
    weight = keras.Variable(tf.ones(_LARGE), name="kernel")
    optimizer.build([weight])
    variables = [weight.value, *(each.value for each in optimizer.variables)]
    touched = 4 * sum((3 if each is weight.value else 2) * each.shape.num_elements() for each in variables)

    def update(gradient: tf.Tensor) -> None:
        old, *state = (each.read_value() for each in variables)
        new = itertools.chain(*pure_apply(optimizer, state, [old], [gradient]))
        for variable, value in zip(variables, new, strict=True):
            variable.assign(value, read_value=False)

    gradient, found = tf.fill(_LARGE, 1e-3), []
    for compiles in ways:
        program = tf.function(update, autograph=False, jit_compile=compiles or None)
        taken = []
        for _ in range(_REPEATS + 1):
            began = time.perf_counter()
            program(gradient)
            weight.value[0, 0].numpy()
            taken.append(time.perf_counter() - began)
        found.append(touched / min(taken[1:]))
    return found


def seconds_of_pass(model: keras.Model, examples: int, *, compiled: bool) -> float:
    """Seconds of a forward and backward pass, the fastest of a few; arguments as of `measure`."""
    return _seconds(_step(model, compiled=compiled), model, examples)


def _step(model: keras.Model, *, compiled: bool) -> Callable[..., Any]:
    def step(inputs: Any, weights: Any, state: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            structured = graph_cost.in_structure(model, inputs)
            outputs, _ = model.stateless_call(weights, state, structured, training=True)
            loss = graph_cost.stand_in_loss(outputs)
        return loss, [each for each in tape.gradient(loss, weights) if each is not None]

    return tf.function(step, autograph=False, jit_compile=compiled or None)


def _seconds(step: Callable[..., Any], model: keras.Model, examples: int) -> float:
    """The fastest of a few passes."""
    inputs = [tf.zeros([examples, *(size or 64 for size in tensor.shape[1:])], tensor.dtype) for tensor in model.inputs]
    weights, state = (
        [tf.convert_to_tensor(each) for each in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )
    taken = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        step(inputs, weights, state)[0].numpy()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


@contextlib.contextmanager
def _reported(compiled: bool) -> Iterator[Callable[[], int]]:
    """In this context XLA reports its programs; the yielded function returns the most temporaries of one, in bytes."""
    if not compiled:
        yield lambda: 0
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = os.environ.get("XLA_FLAGS", "")
        # XLA reads this variable once per process, at the first use of XLA (TensorFlow 2.21).
        os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*"
        try:
            yield lambda: max(map(_temporaries, Path(folder).glob("*buffer-assignment.txt")), default=0)
        finally:
            os.environ["XLA_FLAGS"] = flags


def _temporaries(report: Path) -> int:
    """Bytes of XLA's preallocated temporaries, from its report on the assignment of buffers."""
    found = re.findall(r"^allocation \d+: .*size (\d+),.* preallocated-temp", report.read_text(), re.MULTILINE)
    return sum(map(int, found))

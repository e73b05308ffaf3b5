"""Measures a device's speed in forward and backward passes of a model, and the memory that XLA uses in them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tfpar.models import graph_cost
from tfpar.parallel.planner.costs import ModelCosts

import keras
import tensorflow as tf

_PASSES = 3  # FLOPs of a step over those of the forward pass
_LONG_ENOUGH_S = 0.3
_REPEATS = 3
_MOST_EXAMPLES = 256


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of passes of a model on one device.

    Attributes:
      flops: FLOPs per second of matrix products and convolutions.
      pass_seconds: Fixed seconds of a pass.
      fused: Bytes of activations that XLA holds, as a fraction of those that the graph keeps; 0 without XLA.
    """

    flops: float
    pass_seconds: float
    fused: float = 0.0


def measure_passes(model: keras.Model, costs: ModelCosts, most: int, *, compiled: bool) -> Measured:
    """Times forward and backward passes of a few and of more examples, some seconds in all.

    Args:
      model: A built model with symbolic inputs; dimensions that are not known have length 64.
      costs: From `count_model`.
      most: Examples of the largest micro-batch to try.
      compiled: Whether XLA compiles the passes. XLA reports memory only in a process that has not used it before.
    """
    with _reported(compiled) as temporaries:
        step = _step(model, compiled=compiled)
        few, many = 1, min(max(most, 1), _MOST_EXAMPLES)
        seconds = {few: _seconds(step, model, few)}
        if seconds[few] > _LONG_ENOUGH_S:
            many = min(many, 4)
        elif seconds[few] * many > 8 * _LONG_ENOUGH_S:
            many = max(2, int(8 * _LONG_ENOUGH_S / seconds[few]))
        if many > few:
            seconds[many] = _seconds(step, model, many)
        held = temporaries()
    each = (seconds[many] - seconds[few]) / (many - few) if many > few else seconds[few]
    each = max(each, seconds[many] / many / 2)  # noise may make a larger batch seem free
    kept = sum(layer.kept for layer in costs.whole) * many
    return Measured(
        flops=_PASSES * costs.flops / each,
        pass_seconds=max(0.0, seconds[many] - each * many),
        fused=held / kept if kept else 0.0,
    )


def seconds_of_pass(model: keras.Model, examples: int, *, compiled: bool) -> float:
    """Seconds of a forward and backward pass, the fastest of a few; see `measure_passes`."""
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

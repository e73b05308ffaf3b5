"""tfpar's training step as benchmarks drive and time it."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tfpar
from tfpar import inputs, models, precision

import keras
import tensorflow as tf


class FrameworkLoop:
    """Runs steps as `Trainer.fit` does, on batches of the trainer's own pipeline.

    Args:
      trainer: Where the step comes from.
      source: Training examples.
    """

    def __init__(self, trainer: tfpar.Trainer, source: inputs.Source) -> None:
        program = trainer.program
        program.bind(source)
        self._step = program.step(program.schedule(1 << 30))
        self._iterator = iter(program.distribute(program.pipeline(source, training=True)))
        self._scale = precision.initial(program.config.precision)
        self._done = 0
        self._calls = 0

    def __call__(self, steps: int) -> float:
        """Runs so many steps in one call; the loss of the last. Every fifth call reports norms, as in `fit` those of
        single steps of two seconds do; clocks would not tell all workers the same."""
        position = tf.constant(self._done, tf.int64), tf.constant(steps)
        wants_norms = tf.constant(self._calls % 5 == 0)
        result = self._step.run(self._iterator, *position, self._scale, tf.constant(1.0), wants_norms)
        self._scale = result.loss_scale
        self._done += steps
        self._calls += 1
        return float(result.loss[-1])


def process_bytes(field: str) -> int:
    """Memory of this process, from `/proc/self/status`: now (`VmRSS`), or at most (`VmHWM`)."""
    # Not `ru_maxrss`, which begins with that of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


# Environment of the processes whose tensors `allocated_peak` counts, also if they divide a model, or if TensorFlow
# would not use oneDNN by itself (2.21: on CPUs without AVX-512).
COUNTING = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "0", "TF_ENABLE_ONEDNN_OPTS": "1"}


def allocated_peak() -> int:
    """The most bytes of tensors on this process's CPU devices at once, since `forget_allocated_peak`.

    It is 0 without oneDNN, which counts, and with the system's allocator, which divided models use, unless the
    environment is `COUNTING`.
    """
    try:
        return int(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    except ValueError:
        return 0


def forget_allocated_peak() -> None:
    """Begins `allocated_peak` anew, from what is allocated now."""
    with contextlib.suppress(ValueError):
        tf.config.experimental.reset_memory_stats("CPU:0")


SETTLED = 3  # calls of a run that `median_step_seconds` leaves out


def median_step_seconds(trainer: tfpar.Trainer, source: inputs.Source, steps_per_call: int = 1) -> float:
    """Trains as `Trainer.fit` does; the median seconds of a step.

    Args:
      trainer: For more than `SETTLED` calls of the program, each of `steps_per_call` steps (`--steps_per_loop`).
      source: Training examples.
      steps_per_call: Steps after which time is taken.
    """
    ends: list[float] = []
    trainer.fit(source, hooks=[tfpar.Hook(steps_per_call, lambda state: ends.append(time.perf_counter()))])
    calls = itertools.pairwise(ends[SETTLED - 1 :])
    return statistics.median(end - begin for begin, end in calls) / steps_per_call


def step_seconds(options: Mapping[str, Any], steps_per_call: int = 1) -> float:
    """Trains a model of tfpar's in this process, which may be one of several workers; the median seconds of a step.

    Args:
      options: Options of the run by flag name, among them `steps`.
      steps_per_call: As of `median_step_seconds`.
    """
    flat = {**options, "steps_per_loop": steps_per_call, "verbose": 0}
    config = tfpar.ExperimentConfig.from_flat_dict(flat)
    source, _ = inputs.build_splits(config.input, 0)
    runtime = tfpar.initialize(config, source)
    trainer = tfpar.Trainer(
        lambda: models.build(config.model.model, tfpar.task_spec(source), **config.model.arguments()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
    )
    return median_step_seconds(trainer, source, steps_per_call)


def take_turns(
    loops: Mapping[str, Callable[[int], Any]], rounds: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Times several loops in one process.

    Args:
      loops: By name, what runs a number of steps.
      rounds: Turns of each; they alternate, so that what else the machine does meets all.
      seconds: About the length of a turn.

    Returns:
      Milliseconds per step in each round, by name; and the seconds of the first two steps, which trace and compile.
    """
    first, counts = {}, {}
    for name, loop in loops.items():
        first[name] = _seconds(loop, 2)
        counts[name] = max(3, int(seconds / (_seconds(loop, 3) / 3)))
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            times[name].append(1e3 * _seconds(loop, counts[name]) / counts[name])
    return times, first


def _seconds(loop: Callable[[int], Any], steps: int) -> float:
    began = time.perf_counter()
    loop(steps)
    return time.perf_counter() - began

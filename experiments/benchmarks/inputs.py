"""What the input pipeline costs: a step fed by it against the same step fed from one tensor, for each way in.

python experiments/benchmarks/inputs.py
python experiments/benchmarks/inputs.py --only=digits     # rows whose name contains the word
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from experiments.benchmarks.input_sources import Workload, workloads
from tfpar import inputs, precision
from tfpar.config import ExperimentConfig, flags
from tfpar.doctor import describe_machine

import keras
import numpy as np
import tensorflow as tf
from absl import flags as absl_flags

flags.define(sections=["precision"])
ROUNDS = absl_flags.DEFINE_integer("rounds", 7, "Turns of each side; the median counts.", lower_bound=1)
SECONDS = absl_flags.DEFINE_float("seconds", 2.0, "Length of a turn.", lower_bound=0.1)

ONLY = absl_flags.DEFINE_string("only", "", "Measure the rows whose names contain this.")


def main(_: list[str]) -> None:
    config = flags.experiment_config()
    chosen = [workload for workload in workloads() if ONLY.value in workload.name]
    if not chosen:
        names = "; ".join(workload.name for workload in workloads())
        raise tfpar.ConfigError(f"--only={ONLY.value}: no row has this in its name. Rows: {names}.")
    runtime = tfpar.initialize(config)
    print(describe_machine())
    print(f"\n{'':32}{'one tensor':>12}{'pipeline':>12}{'ratio':>8}{'input wait':>12}{'pipeline alone':>18}")
    for workload in chosen:
        with tempfile.TemporaryDirectory() as folder:
            measure(workload, Path(folder), config, runtime)


def measure(workload: Workload, folder: Path, config: ExperimentConfig, runtime: tfpar.Runtime) -> None:
    """Measures one way in, and prints its row."""
    source = workload.source(folder)
    trainer = tfpar.Trainer(
        functools.partial(workload.model, source),
        "adamw",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
        schedule="constant",
        global_batch_size=workload.batch,
    )
    program = trainer.program
    program.bind(source)
    pipeline = program.pipeline(source, training=True)
    step = program.step(program.schedule(1 << 30))
    element = next(iter(pipeline.dataset()))
    tensor = tf.data.Dataset.from_tensors(element).repeat()
    sides = {
        "one tensor": iter(trainer.strategy.experimental_distribute_dataset(tensor)),
        "pipeline": iter(program.distribute(pipeline)),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    waits: dict[str, list[float]] = {side: [] for side in sides}
    scale = precision.initial(config.precision)

    def turn(side: str, count: int) -> np.ndarray:
        arguments = (tf.constant(0, tf.int64), tf.constant(count), scale, tf.constant(1.0))
        durations: np.ndarray = step.run(sides[side], *arguments).durations.numpy()
        return durations

    turn("one tensor", 5)
    turn("pipeline", 5)
    count = max(5, int(SECONDS.value / turn("pipeline", 20)[:, 4].mean()))
    for _round in range(ROUNDS.value):
        for side in sides:
            durations = turn(side, count)
            times[side].append(durations[:, 4].mean() * 1e3)
            waits[side].append(durations[:, 0].sum() / durations[:, 4].sum())
    median = {side: statistics.median(values) for side, values in times.items()}
    print(
        f"{workload.name:32}{median['one tensor']:9.3f} ms{median['pipeline']:9.3f} ms"
        f"{median['pipeline'] / median['one tensor']:8.3f}{statistics.median(waits['pipeline']):12.2%}"
        f"{rate(pipeline):12.0f} el/s",
        flush=True,
    )


def rate(pipeline: inputs.AnyPipeline) -> float:
    """Elements per second that the pipeline gives when nothing else runs, from the second one on."""
    elements = iter(pipeline.dataset())
    next(elements)
    began = time.perf_counter()
    for count, _ in enumerate(elements, start=1):
        elapsed = time.perf_counter() - began
        if elapsed > SECONDS.value:
            return count / elapsed
    raise AssertionError("a training pipeline does not end")


if __name__ == "__main__":
    flags.run(main)

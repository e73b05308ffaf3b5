"""The step of an mlp whose tensors the C library keeps on its heaps, and maps from the system each time.

TensorFlow makes glibc map every block of more than 128 KiB as soon as there is a GeneratorDataset; tfpar undoes this
between steps. With `MALLOC_MMAP_THRESHOLD_=131072` in the environment, which tfpar leaves as it is, it stays so. The
first row reads a `Dataset.from_generator`; the others have two devices, whose iterators are GeneratorDatasets.

  python experiments/benchmarks/heaps.py --turns=3

Each run is a process of its own; they take turns, and the fastest of each counts. Times need a quiet machine.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from experiments.benchmarks.loops import SETTLED
from tfpar.config import flags
from tfpar.doctor import describe_machine

import keras
import numpy as np
import tensorflow as tf
from absl import flags as absl_flags

RUNS: dict[str, dict[str, Any]] = {
    "one device, from_generator": {"devices": 1},
    "2 devices": {"devices": 2},
    "2 devices, --shard=optimizer": {"devices": 2, "shard": "optimizer"},
    "2 devices, --shard=gradients": {"devices": 2, "shard": "gradients"},
}
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "131072"}
TURNS = absl_flags.DEFINE_integer("turns", 3, "Turns of each run.", lower_bound=1)
MEASURED = absl_flags.DEFINE_integer("measured_steps", 40, "Steps of a turn that count.", lower_bound=2)
CHILD = absl_flags.DEFINE_string("child", "", "Internal: options of the run that this process measures.")

BATCH, WIDTH = 256, 2048


def build() -> keras.Model:
    """10 million weights."""
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input([1024]), *hidden, keras.layers.Dense(10)])


def measure(options: dict[str, Any]) -> dict[str, float]:
    """Median milliseconds of a step, and the mean number of pages that the system zeroed for it."""
    x = np.random.default_rng(0).random([BATCH, 1024], np.float32)
    y = np.arange(BATCH) % 10

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield x, y

    signature = (tf.TensorSpec(x.shape), tf.TensorSpec(y.shape, tf.int64))
    seen: list[tuple[float, int]] = []

    def note(_: tfpar.LoopState) -> None:
        seen.append((time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt))

    trainer = tfpar.Trainer(
        build,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer="adam",
        steps=SETTLED + 1 + MEASURED.value,
        verbose=0,
        **options,
    )
    trainer.fit(tf.data.Dataset.from_generator(batches, output_signature=signature), hooks=[tfpar.Hook(1, note)])
    changes = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairwise(seen[SETTLED:])]
    seconds, pages = zip(*changes, strict=True)
    return {"milliseconds": 1e3 * statistics.median(seconds), "pages": statistics.mean(pages)}


def run(options: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, f"--child={json.dumps(options)}", *sys.argv[1:]]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(_: list[str]) -> None:
    """Prints a table."""
    if CHILD.value:
        print(json.dumps(measure(json.loads(CHILD.value))), flush=True)
        return
    print(describe_machine())
    print(
        "| run | on heaps, ms | mapped, ms | ratio | pages zeroed in a step | mapped |\n|---|---:|---:|---:|---:|---:|"
    )
    for name, options in RUNS.items():
        turns = [(run(options, {}), run(options, MAPPED)) for _ in range(TURNS.value)]
        kept, mapped = (min(turn, key=lambda each: each["milliseconds"]) for turn in zip(*turns, strict=True))
        print(
            f"| {name} | {kept['milliseconds']:.1f} | {mapped['milliseconds']:.1f} "
            f"| {kept['milliseconds'] / mapped['milliseconds']:.2f} | {kept['pages']:.0f} | {mapped['pages']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    flags.run(main)

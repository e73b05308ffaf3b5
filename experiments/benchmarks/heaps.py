"""The step of a model as tfpar sets the C library's heaps, and as the C library and TensorFlow leave them.

TensorFlow makes glibc map every block of more than 128 KiB as soon as there is a GeneratorDataset; tfpar undoes this
between steps. With `MALLOC_MMAP_THRESHOLD_=131072` in the environment, which tfpar leaves as it is, it stays so. All
runs read a `Dataset.from_generator`.

The launcher has glibc ask for huge pages, which the last rows leave out with `GLIBC_TUNABLES=glibc.malloc.hugetlb=0`.

  python experiments/benchmarks/heaps.py --turns=3

Each run is a process of its own; they take turns, and the fastest of each counts. Times need a quiet machine.
"""

from __future__ import annotations

import dataclasses
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
from tfpar import models
from tfpar.config import flags
from tfpar.doctor import describe_machine

import keras
import numpy as np
import tensorflow as tf
from absl import flags as absl_flags


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, and the environment that leaves out what tfpar does."""

    name: str
    options: dict[str, Any]
    without: dict[str, str]
    workers: int = 1


MAPPED = {"MALLOC_MMAP_THRESHOLD_": "131072"}
SMALL_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
LANGUAGE = {"devices": 1, "model": "transformer_lm_tiny"}
RUNS = (
    Run("limit, 1 device", {"devices": 1}, MAPPED),
    Run("limit, 2 devices", {"devices": 2}, MAPPED),
    Run("limit, 2 workers, --shard=optimizer", {"devices": 1, "shard": "optimizer"}, MAPPED, workers=2),
    Run("limit, 2 workers, --shard=gradients", {"devices": 1, "shard": "gradients"}, MAPPED, workers=2),
    Run("huge pages, 2 workers, --shard=optimizer", {"devices": 1, "shard": "optimizer"}, SMALL_PAGES, workers=2),
    Run("huge pages, language model, 2 workers", LANGUAGE, SMALL_PAGES, workers=2),
    Run("the same, --shard=optimizer", {**LANGUAGE, "shard": "optimizer"}, SMALL_PAGES, workers=2),
    Run("the same, --shard=weights", {**LANGUAGE, "shard": "weights"}, SMALL_PAGES, workers=2),
)
TURNS = absl_flags.DEFINE_integer("turns", 3, "Turns of each run.", lower_bound=1)
MEASURED = absl_flags.DEFINE_integer("measured_steps", 40, "Steps of a turn that count.", lower_bound=2)
CHILD = absl_flags.DEFINE_string("child", "", "Internal: options of the run that this process measures.")

BATCH, WIDTH = 256, 2048
TOKENS, SHAPE = 512, (16, 128)  # of each worker
TASK = models.TaskSpec("language_model", SHAPE[1:], "int32", TOKENS)


def build() -> keras.Model:
    """10 million weights."""
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input([1024]), *hidden, keras.layers.Dense(10)])


def measure(options: dict[str, Any]) -> dict[str, float]:
    """Median milliseconds of a step, and the mean number of pages that the system zeroed for it."""
    model, random = options.pop("model", ""), np.random.default_rng(0)
    x = random.integers(TOKENS, size=SHAPE, dtype=np.int32) if model else random.random([BATCH, 1024], np.float32)
    y = x if model else np.arange(BATCH) % 10

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield x, y

    signature = tuple(tf.TensorSpec(each.shape, each.dtype) for each in (x, y))
    seen: list[tuple[float, int]] = []

    def note(_: tfpar.LoopState) -> None:
        seen.append((time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt))

    trainer = tfpar.Trainer(
        (lambda: models.build(model, TASK)) if model else build,
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


def run(each: Run, environment: dict[str, str]) -> dict[str, float]:
    """`measure` in processes of its own."""
    script = [__file__, f"--child={json.dumps(each.options)}", *sys.argv[1:]]
    launcher = ["-m", "tfpar.launch", f"--workers={each.workers}", "--"] if each.workers > 1 else []
    command = [sys.executable, *launcher, *script]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    # The launcher puts the name of a worker before each of its lines.
    return next(json.loads(line[line.index("{") :]) for line in reversed(done.stdout.splitlines()) if "{" in line)


def main(_: list[str]) -> None:
    """Prints a table."""
    if CHILD.value:
        print(json.dumps(measure(json.loads(CHILD.value))), flush=True)
        return
    print(describe_machine())
    print("| run | ms | without, ms | ratio | pages zeroed in a step | without |\n|---|---:|---:|---:|---:|---:|")
    for each in RUNS:
        turns = [(run(each, {}), run(each, each.without)) for _ in range(TURNS.value)]
        ours, without = (min(turn, key=lambda one: one["milliseconds"]) for turn in zip(*turns, strict=True))
        print(
            f"| {each.name} | {ours['milliseconds']:.1f} | {without['milliseconds']:.1f} "
            f"| {ours['milliseconds'] / without['milliseconds']:.2f} | {ours['pages']:.0f} | {without['pages']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    flags.run(main)

"""The step of workers on one machine that each have cores of their own, as the launcher starts them, and that share
all cores (`tfpar.launch --share_cores`).

  python experiments/benchmarks/own_cores.py --turns=3

Each run is a cluster of its own, with a worker for each core, or as many as --workers says. Both sides take turns; the
median step of a run is taken, and the fastest run of each side counts. Needs a quiet machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

from experiments.benchmarks.loops import SETTLED, step_seconds
from tfpar.config import flags
from tfpar.doctor import describe_machine
from tfpar.process.cores import cores

from absl import flags as absl_flags

LANGUAGE = {"model": "transformer_lm_tiny", "dataset": "synthetic:tokens:512", "sequence_length": 128}
IMAGES = {"model": "vit", "dataset": "synthetic:32x32x3"}
WIDE = {"model": "mlp", "model_args": "widths=[2048, 2048, 2048]", "dataset": "synthetic:32x32x1"}
RUNS: dict[str, dict[str, Any]] = {
    "`mlp`, 10 million weights": WIDE,
    "`transformer_lm_tiny`": LANGUAGE,
    "the same, `--shard=optimizer`": {**LANGUAGE, "shard": "optimizer"},
    "the same, `--shard=weights`": {**LANGUAGE, "shard": "weights"},
    "`vit`": IMAGES,
    "the same, `--mesh=pipeline`, 4 micro-batches": {**IMAGES, "mesh": "pipeline", "accumulate_steps": 4},
    "the same, `--mesh=model`": {**IMAGES, "mesh": "model"},
}
flags.define(sections=[])
WORKERS = absl_flags.DEFINE_integer("workers", 0, "Number of workers; 0: one for each core.", lower_bound=0)
BATCH = absl_flags.DEFINE_integer("batch", 32, "Examples of a step.", lower_bound=1)
TURNS = absl_flags.DEFINE_integer("turns", 3, "Runs of each side.", lower_bound=1)
CALLS = absl_flags.DEFINE_integer("measured_calls", 12, "Calls of 4 steps in a run that count.", lower_bound=1)
CHILD = absl_flags.DEFINE_string("child", "", "Internal: options of the run that this process measures.")
_STEPS = 4  # of a call


def measure(options: dict[str, Any]) -> float:
    """Trains in this process, one of the workers; returns the median milliseconds of a step."""
    steps = (SETTLED + CALLS.value) * _STEPS
    return 1e3 * step_seconds({"devices": 1, **options, "steps": steps}, _STEPS)


def run(options: dict[str, Any], workers: int, *launcher_flags: str) -> float:
    """`measure` on a cluster; the slowest worker."""
    mesh = {"mesh": f"{options['mesh']}:{workers}"} if "mesh" in options else {}
    child = json.dumps({**options, **mesh, "global_batch_size": BATCH.value})
    launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={workers}", *launcher_flags, "--"]
    command = [*launcher, __file__, f"--child={child}", *sys.argv[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    # The launcher puts the name of a worker before each of its lines.
    return max(float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "milliseconds" in line)


def main(_: list[str]) -> None:
    """Prints a table."""
    if CHILD.value:
        print(f"milliseconds {measure(json.loads(CHILD.value)):.2f}", flush=True)
        return
    workers = WORKERS.value or cores()
    print(describe_machine())
    print(f"| {workers} workers | own cores, ms | shared, ms | ratio | slowest run | slowest |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for name, options in RUNS.items():
        turns = [(run(options, workers), run(options, workers, "--share_cores")) for _ in range(TURNS.value)]
        own, shared = zip(*turns, strict=True)
        print(
            f"| {name} | {min(own):.1f} | {min(shared):.1f} | {min(own) / min(shared):.2f} | {max(own):.1f} "
            f"| {max(shared):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    flags.run(main)

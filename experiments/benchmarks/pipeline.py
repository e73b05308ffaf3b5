"""Efficiency of a pipeline over workers, each of which has one core of its own, beside a single worker with one core.

The efficiency is the time of a step on one worker over S times that on S workers, with the same micro-batches. A
pipeline without overhead, with V stages of equal cost on each worker, reaches M / (M + (S - 1) / V): `of the bound` is
the measured efficiency over that. Both sides take turns, several times; the median step of each run is taken, and the
fastest run of each side counts. Needs a core for each worker and a quiet machine.

  python experiments/benchmarks/pipeline.py
  python experiments/benchmarks/pipeline.py --stages=2 --micro_batches=16 --jit_compile=false
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tfpar, when started as a script

# Before TensorFlow counts the cores: a worker, and all of its threads, have the first of those that it may use.
if any(argument.startswith("--child") for argument in sys.argv):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import tfpar
from experiments.benchmarks.loops import SETTLED, step_seconds
from tfpar.config import flags
from tfpar.doctor import describe_machine
from tfpar.process.cores import cores

from absl import flags as absl_flags

flags.define(sections=[])
MODEL = absl_flags.DEFINE_string("model", "transformer_lm_tiny", "Model to train.")
MODEL_ARGS = absl_flags.DEFINE_string("model_args", '{"width": 256, "depth": 8}', "Arguments of the model, JSON.")
DATASET = absl_flags.DEFINE_string("dataset", "synthetic:tokens:512", "Data to train it on.")
BATCH = absl_flags.DEFINE_integer("batch", 32, "Examples of a step.", lower_bound=1)
LENGTH = absl_flags.DEFINE_integer("sequence_length", 128, "Tokens of an example.", lower_bound=1)
STAGES = absl_flags.DEFINE_integer("stages", 2, "Workers of the pipeline.", lower_bound=2)
IN_TURN = absl_flags.DEFINE_integer("stages_per_device", 1, "Stages of each worker, in turn.", lower_bound=1)
MICRO_BATCHES = absl_flags.DEFINE_integer("micro_batches", 8, "Micro-batches of a step.", lower_bound=1)
JIT = absl_flags.DEFINE_string("jit_compile", "auto", "As in the experiments.")
SCHEDULE = absl_flags.DEFINE_string("pipeline_schedule", "1f1b", "As in the experiments.")
TRANSPORT = absl_flags.DEFINE_string("transport", "auto", "As in the experiments.")
STEPS = absl_flags.DEFINE_integer(
    "measured_steps", 12, f"Steps of a run; the first {SETTLED} do not count.", lower_bound=SETTLED + 1
)
TURNS = absl_flags.DEFINE_integer("turns", 3, "Runs of each side.", lower_bound=1)
CHILD = absl_flags.DEFINE_string("child", "", "Internal: options of the run that this process measures.")


def on_workers(workers: int) -> float:
    """`step_seconds` of a pipeline with so many stages, or of a single worker: of the slowest one."""
    options = {
        "dataset": DATASET.value,
        "model": MODEL.value,
        "model_args": ",".join(f"{name}={value}" for name, value in json.loads(MODEL_ARGS.value).items()),
        "steps": STEPS.value,
        "global_batch_size": BATCH.value,
        "sequence_length": LENGTH.value,
        "accumulate_steps": MICRO_BATCHES.value,
        "devices": 1,
        "jit_compile": JIT.value,
        "transport": TRANSPORT.value if workers > 1 else "auto",
        **(
            {
                "mesh": f"pipeline:{workers}",
                "pipeline_schedule": SCHEDULE.value,
                "stages_per_device": IN_TURN.value,
            }
            if workers > 1
            else {"strategy": "one_device"}
        ),
    }
    launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={workers}", "--"] if workers > 1 else [sys.executable]
    command = [*launcher, __file__, f"--child={json.dumps(options)}", *sys.argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [float(line.rpartition("seconds ")[2]) for line in done.stdout.splitlines() if "seconds " in line]
    if done.returncode or len(found) != workers:
        raise tfpar.TrainingError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return max(found)


def main(_: list[str]) -> None:
    """Measures both sides in turns, and prints a table."""
    if CHILD.value:
        print(f"seconds {step_seconds(json.loads(CHILD.value)):.6f}", flush=True)
        return
    if cores() < STAGES.value:
        raise tfpar.ConfigError(f"--stages={STAGES.value} needs as many cores, and this machine has {cores()}")
    seconds: dict[int, list[float]] = {1: [], STAGES.value: []}
    for turn in range(TURNS.value):
        for workers, found in seconds.items():
            found.append(on_workers(workers))
            print(f"turn {turn}: {workers} workers: {1e3 * found[-1]:.1f} ms a step", file=sys.stderr, flush=True)
    one, several = (min(found) for found in seconds.values())
    efficiency = one / (STAGES.value * several)
    bound = MICRO_BATCHES.value / (MICRO_BATCHES.value + (STAGES.value - 1) / IN_TURN.value)
    print(f"{describe_machine()}; {MODEL.value} {MODEL_ARGS.value}, batch {BATCH.value} of {LENGTH.value} tokens\n")
    print("| stages | micro-batches | one worker, ms | pipeline, ms | efficiency | bound | of the bound |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    print(
        f"| {STAGES.value} | {MICRO_BATCHES.value} | {1e3 * one:.0f} | {1e3 * several:.0f} | {efficiency:.2f} "
        f"| {bound:.2f} | {efficiency / bound:.2f} |"
    )


if __name__ == "__main__":
    flags.run(main)

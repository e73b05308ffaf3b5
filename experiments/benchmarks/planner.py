"""Plans that were predicted, and how they ran: step time, memory, and whether the best was chosen.

For each case, a model on workers with devices, plans are predicted from passes that are timed in the same call. Then
each runs on a cluster of its own on this machine; the plans take turns, and the fastest turn of each counts. Memory
is what a process has at its peak beyond what it had before the model was built, as the operating system counts it; of
the process that needs most, divided by its devices.

  python experiments/benchmarks/planner.py --cases=mlp:digits:64:1x2,transformer_lm_tiny:text:16:2x1

A case is MODEL:DATASET:BATCH:WORKERSxDEVICES. Times need a quiet machine: with fewer cores than devices, or beside
other programs, they say little.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from experiments.benchmarks.loops import SETTLED, median_step_seconds
from tfpar import inputs, models
from tfpar.config import flags
from tfpar.doctor import describe_machine
from tfpar.parallel.planner.plan import Prediction
from tfpar.training.planning.machines import between_cpus
from tfpar.training.planning.offline import plan_offline

from absl import flags as absl_flags

_MODELS = ("mlp:digits:64", "transformer_lm_tiny:text:16", "vit:synthetic:32x32x3:16")
_SHAPES = ("1x2", "1x4", "2x1", "4x1")

flags.define(sections=[])
CASES = absl_flags.DEFINE_list("cases", [f"{m}:{s}" for m in _MODELS for s in _SHAPES], "Cases, see above.")
MOST = absl_flags.DEFINE_integer("most_plans", 0, "Plans that run, the best predicted; 0: all.", lower_bound=0)
CALLS = absl_flags.DEFINE_integer(
    "measured_calls",
    4,
    "Calls of the training program in a turn that count, of which the median is taken.",
    lower_bound=1,
)
STEPS = absl_flags.DEFINE_integer("steps_per_call", 10, "Steps of a call.", lower_bound=1)
TURNS = absl_flags.DEFINE_integer("turns", 2, "Turns of each plan.", lower_bound=1)
CHILD = absl_flags.DEFINE_string("child", "", "Internal: options of the run that this process measures.")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Trains in this process, one of the workers."""
    import keras

    each = STEPS.value
    length = {"steps": (SETTLED + CALLS.value) * each, "steps_per_loop": each}
    config = tfpar.ExperimentConfig.from_flat_dict({**options, **length, "verbose": 0})
    source, _ = inputs.build_splits(config.input, 0)
    runtime = tfpar.initialize(config, source)
    before = resident()
    trainer = tfpar.Trainer(
        lambda: models.build(config.model.model, tfpar.task_spec(source)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
    )
    seconds = median_step_seconds(trainer, source, each)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "memory": (peak - before) / runtime.topology.local_devices}


def run_plan(workers: int, options: dict[str, Any]) -> dict[str, float]:
    """`measure` on a cluster of its own: the slowest and the largest of its workers."""
    child = [__file__, f"--child={json.dumps(options)}", *sys.argv[1:]]
    launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={workers}", "--"]
    done = subprocess.run(
        [*launcher, *child] if workers > 1 else [sys.executable, *child], capture_output=True, text=True
    )
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"seconds"' in line]
    if done.returncode or not found:
        raise SystemExit(f"{options} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return {name: max(each[name] for each in found) for name in ("seconds", "memory")}


def run_case(case: str) -> str:
    """Predicts and runs the plans of a case; returns its rows."""
    head, _, shape = case.rpartition(":")
    name, _, rest = head.partition(":")
    dataset, _, batch = rest.rpartition(":")
    workers, devices = map(int, shape.split("x"))
    common = {"model": name, "dataset": dataset, "global_batch_size": int(batch), "devices": devices}
    config = tfpar.ExperimentConfig.from_flat_dict(common)
    answer = plan_offline(config, hosts=workers, flops=0.0, between=between_cpus("gloo"))
    plans = answer.fitting[: MOST.value or None]
    ran: list[list[dict[str, float]]] = [[] for _ in plans]
    for _ in range(TURNS.value):
        for place, each in enumerate(plans):
            ran[place].append(run_plan(workers, {**common, **each.plan.options()}))
            print(f"{case} {each.plan.options()}: {ran[place][-1]}", file=sys.stderr, flush=True)
    return rows(case, plans, ran)


def rows(case: str, plans: list[Prediction], ran: list[list[dict[str, float]]]) -> str:
    """A row for each plan, and one on the choice.

    Args:
      case: The case.
      plans: The best predicted first.
      ran: What the turns of each measured.
    """
    seconds = [min(turn["seconds"] for turn in turns) for turns in ran]
    lines = []
    for each, took, turns in zip(plans, seconds, ran, strict=True):
        memory, options = min(turn["memory"] for turn in turns), each.plan.options()
        how = f"{options['mesh']}, {options['accumulate_steps']}, {options['recompute']}, {options['shard']}"
        lines.append(
            f"| {case} | {how} | {1e3 * each.time.seconds:.1f} | {1e3 * took:.1f} | {each.time.seconds / took:.2f} "
            f"| {each.memory.size / 2**20:.1f} | {memory / 2**20:.1f} |"
        )
    lines.append(f"{case}: the choice takes {seconds[0] / min(seconds):.2f} of the best of {len(plans)} plans")
    return "\n".join(lines)


def main(_: list[str]) -> None:
    """Runs all cases and prints a table."""
    if CHILD.value:
        print(json.dumps(measure(json.loads(CHILD.value))), flush=True)
        return
    print(describe_machine())
    print("| case | mesh, micro-batches, recompute, shard | predicted ms | step ms | ratio | predicted MiB | MiB |")
    for case in CASES.value:
        print(run_case(case), flush=True)


if __name__ == "__main__":
    flags.run(main)

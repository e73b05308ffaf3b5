"""Memory of a worker process that trains GPT-2 of 124 million parameters: data parallelism beside what divides a model.

Each way to divide trains on a cluster of its own on this machine. The peak of a process is what the operating system
has counted (`VmHWM`): of all workers the largest, while the model is built, while it trains, and afterwards, when
replicas are compared, the checkpoint and `model.keras` written. `net` is the peak less that of a process that has only
imported TensorFlow, measured in the same call. `tensors` is the most that TensorFlow's allocator has given out at once
in training: what a device needs. Divided models use the system's allocator, which does not count, and so run once more
with --tensors. None of this needs a quiet machine, but four workers of data parallelism need 20 GiB.

  python experiments/benchmarks/memory.py
  python experiments/benchmarks/memory.py --workers=2 --ways=data,model --saves=false --measured_steps=4
  python experiments/benchmarks/memory.py --ways=data,data:2+model:2,data:2+model:2+optimizer
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from experiments.benchmarks.loops import COUNTING, allocated_peak, forget_allocated_peak, process_bytes
from tfpar import inputs, models
from tfpar.config import flags
from tfpar.doctor import describe_machine

from absl import flags as absl_flags

flags.define(sections=[])
MODEL = absl_flags.DEFINE_string("model", "transformer_lm_gpt2", "Model to train.")
MODEL_ARGS = absl_flags.DEFINE_string("model_args", "{}", "Arguments of the model, JSON.")
DATASET = absl_flags.DEFINE_string("dataset", "synthetic:tokens:50257", "Data to train it on.")
BATCH = absl_flags.DEFINE_integer("batch", 4, "Examples in a step, over all workers.", lower_bound=1)
LENGTH = absl_flags.DEFINE_integer("sequence_length", 32, "Tokens of an example.", lower_bound=1)
OPTIMIZER = absl_flags.DEFINE_string("optimizer", "adamw", "Optimizer.")
WORKERS = absl_flags.DEFINE_integer("workers", 4, "Workers of the cluster.", lower_bound=2)
WAYS = absl_flags.DEFINE_list(
    "ways",
    ["data", "model", "pipeline", "weights"],
    "What workers divide: an axis of --mesh, for all of them or with its size, or a value of --shard; several joined "
    "by +, such as data:2+model:2+optimizer.",
)
STEPS = absl_flags.DEFINE_integer("measured_steps", 2, "Steps of a run.", lower_bound=1)
JIT = absl_flags.DEFINE_string("jit_compile", "auto", "Value of --jit_compile in the runs.")
SAVES = absl_flags.DEFINE_bool("saves", True, "Whether runs write checkpoints and model.keras.")
TENSORS = absl_flags.DEFINE_bool("tensors", False, "Whether to count the tensors of divided models, in further runs.")
CHILD = absl_flags.DEFINE_string("child", "", "Internal: options of the run that this process measures.")

AXES = ("data", "model", "pipeline")
PHASES = ("build", "train", "end")
MIB = 2**20


def forget_peak() -> None:
    """Lets the operating system count the peak anew, from what this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(options: dict[str, Any]) -> dict[str, int]:
    """Trains in this process, one of the workers; returns the peak of each phase, and of tensors, bytes."""
    import keras

    config = tfpar.ExperimentConfig.from_flat_dict({**options, "steps": STEPS.value, "verbose": 0})
    source, _ = inputs.build_splits(config.input, 0)
    runtime = tfpar.initialize(config, source)
    peaks: dict[str, int] = {}

    def ends(phase: str) -> None:
        peaks[phase] = process_bytes("VmHWM")
        forget_peak()

    trainer = tfpar.Trainer(
        lambda: models.build(MODEL.value, tfpar.task_spec(source), **json.loads(MODEL_ARGS.value)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
    )
    ends("build")
    forget_allocated_peak()

    def trained(_: Any) -> None:
        ends("train")
        peaks["tensors"] = allocated_peak()

    trainer.fit(source, hooks=[tfpar.Hook(STEPS.value, trained)])
    ends("end")
    return peaks


def options_of(way: str) -> dict[str, Any]:
    """The options of a run in which workers divide the model in a way."""
    parts = way.split("+")
    axes = [part if ":" in part else f"{part}:{WORKERS.value}" for part in parts if part.partition(":")[0] in AXES]
    shards = [part for part in parts if part.partition(":")[0] not in AXES]
    divided = {"mesh": ",".join(axes), "shard": shards[0] if shards else "none"}
    pipeline = any(axis.startswith("pipeline:") for axis in axes)
    replicas = next((int(axis.partition(":")[2]) for axis in axes if axis.startswith("data:")), 1)
    micro_batches = BATCH.value // replicas if pipeline else 1
    return {
        "dataset": DATASET.value,
        "model": MODEL.value,
        "global_batch_size": BATCH.value,
        "sequence_length": LENGTH.value,
        "optimizer": OPTIMIZER.value,
        "accumulate_steps": micro_batches,
        "devices": 1,
        **({"stage_balance": "weights"} if pipeline else {}),
        "jit_compile": JIT.value,
        **divided,
    }


def on_cluster(way: str, environment: Mapping[str, str] = {}) -> dict[str, int]:
    """`measure` on a cluster of its own: of each phase, what the largest worker needs."""
    with tempfile.TemporaryDirectory() as workdir:
        options = {**options_of(way), **({"workdir": workdir} if SAVES.value else {})}
        launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={WORKERS.value}", "--"]
        command = [*launcher, __file__, f"--child={json.dumps(options)}", *sys.argv[1:]]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"train"' in line]
    if done.returncode or len(found) != WORKERS.value:
        raise SystemExit(f"{way} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    print(f"{way}: {[{phase: size // MIB for phase, size in each.items()} for each in found]}", file=sys.stderr)
    return {name: max(peaks[name] for peaks in found) for name in (*PHASES, "tensors")}


def imported_only() -> int:
    """The peak of a process that only imports TensorFlow, bytes."""
    code = "import tensorflow; print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM:')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return 1024 * int(done.stdout.split()[1])


def main(_: list[str]) -> None:
    """Measures every way and prints a table."""
    if CHILD.value:
        print(json.dumps(measure(json.loads(CHILD.value))), flush=True)
        return
    base = imported_only()
    print(f"{MODEL.value}, {OPTIMIZER.value}, batch {BATCH.value} of {LENGTH.value} tokens, {WORKERS.value} workers")
    print(f"{describe_machine()}; a process that only imports TensorFlow: {base / MIB:.0f} MiB")
    names = "".join(f"{phase + ' MiB':>11}" for phase in PHASES)
    ratios = f"{'peak ratio':>12}{'net ratio':>11}{'tensors MiB':>13}{'ratio':>7}"
    width = max(map(len, [*WAYS.value, "divided  "])) + 1
    print(f"{'divided':<{width}}{names}{'peak MiB':>10}{'net MiB':>9}{ratios}")
    first = tensors = 0
    for way in WAYS.value:
        phases = on_cluster(way)
        peak = max(phases[phase] for phase in PHASES)
        if TENSORS.value and not phases["tensors"]:
            phases["tensors"] = on_cluster(way, COUNTING)["tensors"]
        first, tensors = first or peak, tensors or phases["tensors"]
        columns = "".join(f"{phases[phase] / MIB:>11.0f}" for phase in PHASES)
        ratios = f"{peak / first:>12.2f}{(peak - base) / (first - base):>11.2f}"
        if phases["tensors"]:
            ratios += f"{phases['tensors'] / MIB:>13.0f}{phases['tensors'] / tensors:>7.2f}"
        print(f"{way:<{width}}{columns}{peak / MIB:>10.0f}{(peak - base) / MIB:>9.0f}{ratios}", flush=True)


if __name__ == "__main__":
    flags.run(main)

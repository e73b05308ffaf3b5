"""Whether compressed exchange learns as well as dense: held-out loss of each codec, against `none` with the same seeds.

Starts a cluster on this machine; its workers train every codec with every seed, one after the other. A run that is cut
off goes on where it was. Two tasks: the convnet on digits, and the tiny byte-level language model.

  python experiments/benchmarks/convergence.py --workers=4 --seeds=5 --output=convergence.jsonl
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import tfpar
from tfpar import inputs, models
from tfpar.config import ConfigError, ExperimentConfig, flags
from tfpar.doctor import describe_machine

import keras
from absl import flags as absl_flags

SPECS = ("none", "bf16", "fp8", "int8", "int4", "int2", "sign", "topk:0.01", "powersgd:4")
TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "dataset": "digits",
        "model": "convnet",
        "steps": 230,
        "global_batch_size": 64,
        "optimizer": "adamw",
        "learning_rate": 0.003,
        "warmup_steps": 20,
        "augment": "shift:1",
    },
    "language": {
        "dataset": "text",
        "model": "transformer_lm_tiny",
        "steps": 120,
        "global_batch_size": 16,
        "sequence_length": 64,
        "optimizer": "adamw",
        "learning_rate": 0.003,
        "warmup_steps": 20,
        "clip_norm": 1.0,
        "validation_fraction": 0.01,
    },
}
# Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
# Runs of one cluster of processes: TensorFlow 2.21 keeps the XLA programs of all, and crashed after some 25.
_RUNS_AT_ONCE = 9

WORKERS = absl_flags.DEFINE_integer("workers", 4, "Worker processes.", lower_bound=2)
SEEDS = absl_flags.DEFINE_integer("seeds", 5, "Seeds 0, 1, ... of each codec.", lower_bound=1, upper_bound=10)
ONLY = absl_flags.DEFINE_list("tasks", list(TASKS), "Which tasks.")
EXCHANGES = absl_flags.DEFINE_list("exchanges", list(SPECS), "Which exchanges; `none` is what they are compared with.")
OUTPUT = absl_flags.DEFINE_string(
    "output", "convergence.jsonl", "Results, a line a run; what is there is not run again."
)
MEMBER = absl_flags.DEFINE_boolean("member", False, "Used inside: this process is one of the workers.")

Run = tuple[str, str, int]  # task, exchange, seed


def train(task: str, spec: str, seed: int, runtime: tfpar.Runtime) -> dict[str, float]:
    """One run on all workers; the held-out results."""
    config = ExperimentConfig.from_flat_dict(
        {**TASKS[task], "exchange": spec, "seed": seed, "strategy": "multi_worker", "eval_every": TASKS[task]["steps"]}
    )
    data, held_out = inputs.build_splits(config.input, config.train.seed)
    keras.utils.set_random_seed(seed)
    trainer = tfpar.Trainer(
        lambda: models.build(config.model.model, tfpar.task_spec(data)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        config=config,
        runtime=runtime,
    )
    return trainer.fit(data, validation=held_out)["eval"]


def done(path: pathlib.Path) -> dict[Run, dict[str, float]]:
    """Results so far."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["task"], row["exchange"], row["seed"]): row["eval"] for row in rows}


def member(runs: Sequence[Run], path: pathlib.Path) -> None:
    """What each worker does."""
    first = ExperimentConfig.from_flat_dict({**TASKS[runs[0][0]], "strategy": "multi_worker"})
    runtime = tfpar.initialize(first)
    for number, (task, spec, seed) in enumerate(runs, 1):
        results = train(task, spec, seed, runtime)
        if runtime.topology.is_chief:
            with path.open("a") as file:
                file.write(json.dumps({"task": task, "exchange": spec, "seed": seed, "eval": results}) + "\n")
            print(f"run {number}/{len(runs)}: {task} {spec} seed {seed}: loss {results['loss']:.4f}", flush=True)


def interval(values: Sequence[float]) -> str:
    """Mean and half the 95 % confidence interval."""
    if len(values) < 2:
        return f"{values[0]:.4f}"
    half = T95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.4f} ± {half:.4f}"


def table(results: dict[Run, dict[str, float]], tasks: Sequence[str], specs: Sequence[str]) -> str:
    """Markdown; the difference is of the same seeds, and within noise where its interval holds 0."""
    lines = [
        "| task | exchange | seeds | held-out loss | accuracy | loss - none, same seeds | within noise |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for task in tasks:
        for spec in specs:
            seeds = [seed for seed in range(10) if (task, spec, seed) in results]
            if not seeds:
                continue
            losses = [results[task, spec, seed]["loss"] for seed in seeds]
            accuracy = [results[task, spec, seed]["accuracy"] for seed in seeds]
            both = [seed for seed in seeds if (task, "none", seed) in results]
            differences = [results[task, spec, seed]["loss"] - results[task, "none", seed]["loss"] for seed in both]
            cells = [task, spec, str(len(seeds)), interval(losses), interval(accuracy)]
            if spec == "none" or len(differences) < 2:
                cells += ["", ""]
            else:
                half = T95[len(differences) - 2] * statistics.stdev(differences) / math.sqrt(len(differences))
                mean = statistics.mean(differences)
                cells += [interval(differences), "yes" if abs(mean) <= half else "better" if mean < 0 else "**no**"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(_: list[str]) -> None:
    if unknown := [name for name in ONLY.value if name not in TASKS]:
        raise ConfigError(f"--tasks={','.join(unknown)}: choose from {', '.join(TASKS)}.")
    path = pathlib.Path(OUTPUT.value)
    runs = [(task, spec, seed) for task in ONLY.value for seed in range(SEEDS.value) for spec in EXCHANGES.value]
    while missing := [run for run in runs if run not in done(path)]:
        if MEMBER.value:
            member(missing[:_RUNS_AT_ONCE], path)
            return
        arguments = [
            f"--{flag}={value}"
            for flag, value in (
                ("seeds", SEEDS.value),
                ("tasks", ",".join(ONLY.value)),
                ("exchanges", ",".join(EXCHANGES.value)),
                ("output", path),
            )
        ]
        launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={WORKERS.value}", "--"]
        subprocess.run([*launcher, __file__, "--member", *arguments], check=True)
    print(f"\n{describe_machine()}; {WORKERS.value} workers\n")
    print(table(done(path), ONLY.value, EXCHANGES.value))


if __name__ == "__main__":
    flags.run(main)

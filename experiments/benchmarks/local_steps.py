"""Bytes and held-out loss of local steps: a byte-level language model on the same tokens, over H and codecs.

Starts a cluster on this machine, whose workers train every case with every seed, one after the other. A run that is cut
off goes on where it was.

  python experiments/benchmarks/local_steps.py --workers=4 --seeds=3 --output=local_steps.jsonl

A case is local steps, an exchange, and maybe a number of fragments: `50/int4`, `50/int4/4`. Give each set of --options
an --output of its own.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import tfpar
from tfpar import inputs, models
from tfpar.config import ExperimentConfig, flags
from tfpar.config.fields import parse_arguments
from tfpar.doctor import describe_machine

import keras
from absl import flags as absl_flags

CASES = ("1/none", "1/int4", "10/none", "10/int4", "50/none", "50/int4", "200/int4")
TASK: dict[str, Any] = {
    "dataset": "text",
    "model": "transformer_lm_tiny",
    "global_batch_size": 16,
    "sequence_length": 64,
    "optimizer": "adamw",
    "learning_rate": 0.003,
    "warmup_steps": 20,
    "clip_norm": 1.0,
    "validation_fraction": 0.01,
    "eval_steps": 40,
    "strategy": "multi_worker",
}

WORKERS = absl_flags.DEFINE_integer("workers", 4, "Worker processes.", lower_bound=2)
SEEDS = absl_flags.DEFINE_integer("seeds", 3, "Seeds 0, 1, ... of each case.", lower_bound=1)
STEPS = absl_flags.DEFINE_integer("steps", 400, "Steps of a run.", lower_bound=1)
ONLY = absl_flags.DEFINE_list("cases", list(CASES), "Which cases.")
MODEL_ARGS = absl_flags.DEFINE_string("model_args", "width=64,depth=2,heads=2", "Of transformer_lm_tiny.")
OPTIONS = absl_flags.DEFINE_string(
    "options",
    "",
    "Other options, as key=value divided by commas; those of the outer optimizer are for local steps alone.",
)
OUTPUT = absl_flags.DEFINE_string("output", "local_steps.jsonl", "Results, a line a run; what is there is not rerun.")
MEMBER = absl_flags.DEFINE_boolean("member", False, "Used inside: this process is one of the workers.")

Run = tuple[str, int]  # case, seed


def train(case: str, seed: int, steps: int, runtime: tfpar.Runtime | None) -> tuple[tfpar.Runtime, dict[str, Any]]:
    """One run on all workers; its summary."""
    local_steps, exchange, *fragments = case.split("/")
    given = parse_arguments("--options", OPTIONS.value, example="global_batch_size=64")
    if local_steps == "1":
        given = {name: value for name, value in given.items() if not name.startswith("outer_")}
    options = {**TASK, **given, "model_args": MODEL_ARGS.value, "seed": seed}
    options |= {"local_steps": int(local_steps), "exchange": exchange}
    options["outer_fragments"] = int(fragments[0]) if fragments else 1
    config = ExperimentConfig.from_flat_dict({**options, "steps": steps, "eval_every": steps})
    runtime = runtime or tfpar.initialize(config)
    data, held_out = inputs.build_splits(config.input, seed)
    keras.utils.set_random_seed(seed)
    trainer = tfpar.Trainer(
        lambda: models.build(config.model.model, tfpar.task_spec(data), **config.model.arguments()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
    )
    return runtime, trainer.fit(data, validation=held_out)


def done(path: pathlib.Path) -> dict[Run, dict[str, Any]]:
    """Results so far."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["case"], row["seed"]): row for row in rows}


def member(runs: Sequence[Run], steps: int, path: pathlib.Path) -> None:
    """What each worker does."""
    runtime = None
    for case, seed in runs:
        runtime, summary = train(case, seed, steps, runtime)
        if runtime.topology.is_chief:
            row = {"case": case, "seed": seed, "steps": steps, "loss": summary["eval"]["loss"]}
            row |= {name: summary["exchange"][f"{name}_per_step"] for name in ("wire_bytes", "dense_wire_bytes")}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{case} seed {seed}: held-out loss {row['loss']:.4f}", flush=True)


def table(results: dict[Run, dict[str, Any]], cases: Sequence[str]) -> str:
    """Markdown; the first case is what the others are compared with, seed by seed."""
    lines = [
        "| local steps | exchange | seeds | bytes a step | fewer than dense | held-out loss | against the first row |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        rows = [row for (name, _), row in sorted(results.items()) if name == case]
        if not rows:
            continue
        both = [row for row in rows if (cases[0], row["seed"]) in results]
        ratios = [row["loss"] / results[cases[0], row["seed"]]["loss"] - 1.0 for row in both]
        sent, dense = rows[0]["wire_bytes"], rows[0]["dense_wire_bytes"]
        loss, change = statistics.mean(row["loss"] for row in rows), f"{statistics.mean(ratios):+.1%}" if ratios else ""
        local_steps, exchange, *fragments = case.split("/")
        exchange += f", {fragments[0]} fragments" if fragments else ""
        cells = [local_steps, exchange, len(rows), f"{sent:,}", f"{dense / sent:.0f}", f"{loss:.4f}", change]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(_: list[str]) -> None:
    path, steps = pathlib.Path(OUTPUT.value), STEPS.value
    runs = [(case, seed) for seed in range(SEEDS.value) for case in ONLY.value]
    missing = [run for run in runs if run not in done(path)]
    if MEMBER.value:
        member(missing, steps, path)
        return
    if missing:
        given = {"seeds": SEEDS.value, "cases": ",".join(ONLY.value), "output": path, "steps": steps}
        given |= {"options": OPTIONS.value, "model_args": MODEL_ARGS.value}
        arguments = [f"--{name}={value}" for name, value in given.items()]
        launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={WORKERS.value}", "--"]
        subprocess.run([*launcher, __file__, "--member", *arguments], check=True)
    print(f"\n{describe_machine()}; {WORKERS.value} workers, {steps} steps; {MODEL_ARGS.value}; {OPTIONS.value}\n")
    print(table(done(path), ONLY.value))


if __name__ == "__main__":
    flags.run(main)

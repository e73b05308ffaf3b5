"""Adapters against full fine-tuning: held-out loss on new text, weights that train, and bytes that a step sends.

A byte-level language model learns the sources of Python's standard library, then those of Keras; the second time whole,
and with --lora. Every run is a process of its own; of several learning rates, the best one of each is shown.

  python experiments/benchmarks/adapters.py --steps=3000 --new_steps=600
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # for tfpar, when started as a script

import tfpar
from tfpar.config import flags
from tfpar.doctor import describe_machine

import keras
from absl import flags as absl_flags

flags.define(sections=[])
MODEL = absl_flags.DEFINE_string("model", "transformer_lm_tiny", "Language model.")
STEPS = absl_flags.DEFINE_integer("steps", 3000, "Steps on the first text.", lower_bound=1)
NEW_STEPS = absl_flags.DEFINE_integer("new_steps", 600, "Steps on the new text.", lower_bound=1)
SEEDS = absl_flags.DEFINE_integer("seeds", 1, "Runs of each, with seeds from 0.", lower_bound=1)
CASES = absl_flags.DEFINE_list(
    "cases",
    ["full:0.0003", "full:0.001", "lora=8:0.003", "lora=8:0.01"],
    "What trains, full or an option --lora, and the learning rate behind a colon.",
)
SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "language_model.py"


def run(workdir: pathlib.Path, **options: Any) -> dict[str, Any]:
    """The summary of one run."""
    given = {"model": MODEL.value, "global_batch_size": 16, "sequence_length": 128, "validation_fraction": 0.02}
    given |= {"eval_steps": 60, "warmup_steps": 20, "strategy": "one_device", "verbose": 0, **options}
    command = [sys.executable, str(SCRIPT), f"--workdir={workdir}"]
    command += [f"--{name}={value}" for name, value in given.items()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise tfpar.TrainingError(f"{' '.join(command)}: {ended.stderr.strip()[-2000:]}")
    summary: dict[str, Any] = json.loads((workdir / "summary.json").read_text())
    return summary


def main(_: list[str]) -> None:
    new = f"text:{pathlib.Path(keras.__file__).parent / 'src' / 'layers'}/**/*.py"
    best: dict[str, list[tuple[float, str, dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        for seed in range(SEEDS.value):
            base = root / f"base-{seed}"
            summary = run(base, seed=seed, dataset="text", steps=STEPS.value, learning_rate=0.003)
            print(f"seed {seed}: first text, held-out loss {summary['eval']['loss']:.4f}", flush=True)
            found: dict[str, list[tuple[float, str, dict[str, Any]]]] = {}
            for number, case in enumerate(CASES.value):
                what, _, rate = case.rpartition(":")
                lora = {"lora": what.removeprefix("lora=")} if what != "full" else {}
                options = {"seed": seed, "dataset": new, "steps": NEW_STEPS.value, "learning_rate": rate}
                summary = run(root / f"{seed}-{number}", warm_start=base, **options, **lora)
                found.setdefault(what, []).append((summary["eval"]["loss"], rate, summary))
                print(f"seed {seed}: {case}: held-out loss {summary['eval']['loss']:.4f}", flush=True)
            for what, runs in found.items():
                best.setdefault(what, []).append(min(runs, key=lambda each: each[0]))
    print(f"\n{describe_machine()}; {MODEL.value}, {STEPS.value} and {NEW_STEPS.value} steps, {SEEDS.value} seeds\n")
    print("| trains | learning rate | held-out loss | against full |\n|---|---:|---:|---:|")
    full = [loss for loss, _, _ in best.get("full", [])]
    for what, runs in best.items():
        losses = [loss for loss, _, _ in runs]
        ratio = f"{sum(losses) / sum(full) - 1.0:+.1%}" if full else ""
        rates = ", ".join(sorted({rate for _, rate, _ in runs}))
        print(f"| {what} | {rates} | {sum(losses) / len(losses):.4f} | {ratio} |")


if __name__ == "__main__":
    flags.run(main)

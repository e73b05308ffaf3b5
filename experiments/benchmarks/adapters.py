"""Adapters against full fine-tuning: held-out loss on new text, and how much of the weights is trained and sent.

A byte-level language model learns one text, then another: the second time whole, and with --lora. Every run is a
process of its own. A run counts with its best evaluation, as with early stopping, and the best learning rate of each
case is shown. The gain is the share of what full fine-tuning takes off the loss of the unchanged model.

  python experiments/benchmarks/adapters.py --steps=3000 --new_steps=600
"""

from __future__ import annotations

import csv
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # for tfpar, when started as a script

import tfpar
from tfpar.config import flags
from tfpar.doctor import describe_machine

import keras
from absl import flags as absl_flags

flags.define(sections=[])
MODEL = absl_flags.DEFINE_string("model", "transformer_lm_tiny", "Language model.")
MODEL_ARGS = absl_flags.DEFINE_string("model_args", "", "Its arguments.")
TEXT = absl_flags.DEFINE_string("text", "text", "First text, as --dataset.")
NEW_TEXT = absl_flags.DEFINE_string(
    "new_text", f"text:{pathlib.Path(keras.__file__).parent / 'src' / 'layers'}/**/*.py", "New text, as --dataset."
)
STEPS = absl_flags.DEFINE_integer("steps", 3000, "Steps on the first text.", lower_bound=1)
LEARNING_RATE = absl_flags.DEFINE_float("learning_rate", 0.02, "Learning rate on the first text.")
NEW_STEPS = absl_flags.DEFINE_integer("new_steps", 600, "Steps on the new text.", lower_bound=1)
NEW_OPTIONS = absl_flags.DEFINE_multi_string("new_option", [], "More options on the new text, e.g. optimizer=adamw.")
EVALUATIONS = absl_flags.DEFINE_integer("evaluations", 6, "Evaluations of a run on the new text.", lower_bound=1)
SEEDS = absl_flags.DEFINE_integer("seeds", 1, "Runs of each, with seeds from 0.", lower_bound=1)
CASES = absl_flags.DEFINE_multi_string(
    "case",
    ["full:0.0003", "full:0.001", "lora=8:0.003", "lora=8:0.01"],
    "What trains, full or options such as lora=8&trainable=norm, and the learning rate behind a colon.",
)
WORKDIR = absl_flags.DEFINE_string("workdir", "", "Keeps the runs here, and uses those that are here already.")
SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "language_model.py"


class Run(NamedTuple):
    """What a run gave: its lowest held-out loss, the parameters that trained, and all parameters."""

    loss: float
    trained: int
    parameters: int


def run(workdir: pathlib.Path, **options: Any) -> Run:
    """Trains once, in a process of its own."""
    given = {"model": MODEL.value, "model_args": MODEL_ARGS.value, "global_batch_size": 16, "sequence_length": 128}
    given |= {"validation_fraction": 0.05, "eval_steps": 100, "warmup_steps": 20, "strategy": "one_device", **options}
    command = [sys.executable, str(SCRIPT), f"--workdir={workdir}"]
    command += [f"--{name}={value}" for name, value in given.items()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise tfpar.TrainingError(f"{' '.join(command)}: {ended.stderr.strip()[-2000:]}")
    with open(workdir / "metrics.csv", encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["run"] == "eval"]
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    return Run(min(losses), summary["trainable_parameters"], summary["parameters"])


def table(before: list[float], best: dict[str, list[tuple[str, Run]]]) -> str:
    """The best runs of each case, by seed, as a table.

    Args:
      before: Held-out loss of the unchanged model.
      best: Learning rates and runs; the case `full` is what the others are compared with.
    """
    lines = ["| trains | share of the weights | learning rate | held-out loss | against full | gain |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    start = statistics.fmean(before)
    full = statistics.fmean(each.loss for _, each in best["full"]) if "full" in best else None
    lines += [f"| nothing | 0 % | | {start:.4f} | | |"]
    for what, runs in best.items():
        loss = statistics.fmean(each.loss for _, each in runs)
        share = 100.0 * runs[0][1].trained / runs[0][1].parameters
        rates = ", ".join(sorted({rate for rate, _ in runs}))
        difference = f"{100.0 * (loss / full - 1.0):+.2f} %" if full else ""
        gain = f"{100.0 * (start - loss) / (start - full):.0f} %" if full else ""
        lines += [f"| {what} | {share:.2f} % | {rates} | {loss:.4f} | {difference} | {gain} |"]
    return "\n".join(lines)


def main(_: list[str]) -> None:
    best: dict[str, list[tuple[str, Run]]] = {}
    before: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(WORKDIR.value or directory)
        for seed in range(SEEDS.value):
            base = root / f"base-{seed}"
            options = {"seed": seed, "dataset": TEXT.value, "steps": STEPS.value}
            loss = run(base, learning_rate=LEARNING_RATE.value, **options).loss
            print(f"seed {seed}: first text, held-out loss {loss:.4f}", flush=True)
            options = {"seed": seed, "dataset": NEW_TEXT.value, "warm_start": base}
            # One step that changes no weight.
            unchanged = run(
                root / f"{seed}-unchanged", steps=1, warmup_steps=0, learning_rate=1e-9, weight_decay=0, **options
            )
            before.append(unchanged.loss)
            print(f"seed {seed}: nothing: held-out loss {unchanged.loss:.4f}", flush=True)
            options |= {"steps": NEW_STEPS.value, "eval_every": -(-NEW_STEPS.value // EVALUATIONS.value)}
            options |= dict(option.split("=", 1) for option in NEW_OPTIONS.value)
            found: dict[str, list[tuple[str, Run]]] = {}
            for case in CASES.value:
                what, _, rate = case.rpartition(":")
                own = dict(option.split("=", 1) for option in what.split("&")) if what != "full" else {}
                name = re.sub(r"\W+", "-", case)
                ended = run(root / f"{seed}-{name}", learning_rate=rate, **options, **own)
                found.setdefault(what, []).append((rate, ended))
                print(f"seed {seed}: {case}: held-out loss {ended.loss:.4f}, {ended.trained:,} parameters", flush=True)
            for what, runs in found.items():
                best.setdefault(what, []).append(min(runs, key=lambda each: each[1].loss))
    model = f"{MODEL.value} {MODEL_ARGS.value}".strip()
    print(f"\n{describe_machine()}; {model}, {STEPS.value} and {NEW_STEPS.value} steps, {SEEDS.value} seeds\n")
    print(table(before, best))


if __name__ == "__main__":
    flags.run(main)

"""What each method of incremental learning keeps: digits in five tasks of two classes.

Every run is a process of its own.

  python experiments/benchmarks/incremental.py --seeds=5
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # for tfpar, when started as a script

import tfpar
from tfpar.config import flags
from tfpar.doctor import describe_machine

import numpy as np
from absl import flags as absl_flags

flags.define(sections=[])
CASES = absl_flags.DEFINE_list(
    "cases",
    ["finetune", "lwf", "ewc:ewc_strength=10000", "replay:replay_examples=200", "joint"],
    "Methods to run, each with an option after a colon.",
)
SEEDS = absl_flags.DEFINE_integer("seeds", 5, "Runs of each, with seeds from 0.", lower_bound=1)
EPOCHS = absl_flags.DEFINE_float("epochs", 20.0, "Passes over the examples of a task.", lower_bound=0.1)
SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "incremental.py"


def measure(case: str, seed: int) -> dict[str, float]:
    """The figures of one run."""
    method, _, option = case.partition(":")
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, str(SCRIPT), f"--method={method}", f"--seed={seed}", f"--epochs={EPOCHS.value}"]
        command += [
            *([f"--{option}"] if option else []),
            "--strategy=one_device",
            "--verbose=0",
            f"--workdir={workdir}",
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise tfpar.TrainingError(f"{' '.join(command)}: {ended.stderr.strip().splitlines()[-1]}")
        summary = json.loads((pathlib.Path(workdir) / "summary.json").read_text())
    return {name: summary[name] for name in ("average_accuracy", "forgetting", "backward_transfer")}


def main(_: list[str]) -> None:
    rows = []
    for case in CASES.value:
        found = []
        for seed in range(SEEDS.value):
            print(f"{case}, seed {seed}", file=sys.stderr)
            found.append(measure(case, seed))
        cells = []
        for name in found[0]:
            values = [each[name] for each in found]
            cells.append(f"{np.mean(values):.3f} ± {np.std(values):.3f}")
        rows.append(f"| {case} | {' | '.join(cells)} |")
    print(f"{describe_machine()}; {SEEDS.value} seeds\n")
    print("| method | average accuracy | forgetting | backward transfer |\n|---|---:|---:|---:|")
    print("\n".join(rows))


if __name__ == "__main__":
    flags.run(main)

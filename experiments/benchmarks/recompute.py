"""What recomputing activations saves and costs: temporaries of the compiled step, and its time.

Each setting of --recompute trains in a process of its own, because XLA reports memory for a whole process. The settings
take turns, and the fastest turn of each counts. The figure of memory is XLA's: the temporaries of the largest program
of the step, in which forward and backward pass are one. It needs no quiet machine.

  python experiments/benchmarks/recompute.py --model=transformer_lm_small --batch=8
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from tfpar import inputs, models
from tfpar.config import flags
from tfpar.doctor import describe_machine

from absl import flags as absl_flags

flags.define(sections=[])
MODEL = absl_flags.DEFINE_string("model", "transformer_lm_small", "Model to train.")
DATASET = absl_flags.DEFINE_string("dataset", "text", "Data to train it on.")
BATCH = absl_flags.DEFINE_integer("batch", 8, "Examples in a step.", lower_bound=1)
SETTINGS = absl_flags.DEFINE_list("settings", ["none", "blocks"], "Values of --recompute; the first is the base.")
STEPS = absl_flags.DEFINE_integer("measured_steps", 4, "Steps of a turn, after the first.", lower_bound=1)
TURNS = absl_flags.DEFINE_integer("turns", 2, "Turns of each setting.", lower_bound=1)
CHILD = absl_flags.DEFINE_string("child", "", "Internal: the setting that this process measures.")


def measure(setting: str) -> dict[str, Any]:
    """Trains in this process: `seconds` of a step and the `loss` after it."""
    import keras

    config = tfpar.ExperimentConfig.from_flat_dict(
        {
            "dataset": DATASET.value,
            "global_batch_size": BATCH.value,
            "recompute": setting,
            "jit_compile": "true",
            "strategy": "one_device",
            "verbose": 0,
        }
    )
    source, _ = inputs.build_splits(config.input, 0)
    trainer = tfpar.Trainer(
        lambda: models.build(MODEL.value, tfpar.task_spec(source)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
    )
    trainer.fit(source, steps=1)
    began = time.perf_counter()
    summary = trainer.fit(source, steps=STEPS.value)
    return {"seconds": (time.perf_counter() - began) / STEPS.value, "loss": summary["train_loss"]}


def in_child(setting: str) -> dict[str, Any]:
    """`measure` in a process of its own, and `temporaries`, bytes."""
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*"
        environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {dump}"}
        command = [sys.executable, __file__, f"--child={setting}", *sys.argv[1:]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"--recompute={setting} failed:\n{done.stderr[-3000:]}")
        reports = [path.read_text() for path in Path(folder).glob("*buffer-assignment.txt")]
    return {**json.loads(done.stdout.splitlines()[-1]), "temporaries": max(map(temporaries, reports))}


def temporaries(report: str) -> int:
    """Bytes of XLA's preallocated temporaries, from its report on the assignment of buffers."""
    return sum(map(int, re.findall(r"^allocation \d+: .*size (\d+),.* preallocated-temp", report, re.MULTILINE)))


def main(_: list[str]) -> None:
    """Measures every setting in turn and prints a table."""
    if CHILD.value:
        print(json.dumps(measure(CHILD.value)))
        return
    print(f"{MODEL.value}, batch {BATCH.value}; {describe_machine()}")
    turns = [(setting, in_child(setting)) for _ in range(TURNS.value) for setting in SETTINGS.value]
    base = SETTINGS.value[0]
    fastest = {each: min(found["seconds"] for name, found in turns if name == each) for each in SETTINGS.value}
    last = dict(turns)
    print(f"{'recompute':<20}{'temporaries MiB':>16}{'ratio':>8}{'step ms':>10}{'ratio':>8}{'loss':>10}")
    for each in SETTINGS.value:
        memory, loss = last[each]["temporaries"], last[each]["loss"]
        print(
            f"{each:<20}{memory / 2**20:>16.1f}{memory / last[base]['temporaries']:>8.2f}"
            f"{1e3 * fastest[each]:>10.1f}{fastest[each] / fastest[base]:>8.2f}{loss:>10.5f}"
        )


if __name__ == "__main__":
    flags.run(main)

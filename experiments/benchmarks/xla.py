"""What XLA gains or costs on this machine: tfpar's step with and without it, for models of each kind.

Both train the same model on the same batches in one process, taking turns; the median of the turns counts. It is what
`--jit_compile=auto` goes by: no XLA for convolutional models on CPUs.

  python experiments/benchmarks/xla.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from experiments.benchmarks.loops import FrameworkLoop, take_turns
from tfpar import inputs, models
from tfpar.config import ExperimentConfig, InputConfig, flags
from tfpar.doctor import describe_machine

import keras
from absl import flags as absl_flags

flags.define(sections=["precision"])
ROUNDS = absl_flags.DEFINE_integer("rounds", 7, "Turns of each contender; the median counts.", lower_bound=2)
SECONDS = absl_flags.DEFINE_float("seconds", 1.0, "Length of a turn.", lower_bound=0.1)
ONLY = absl_flags.DEFINE_string("only", "", "One workload by the beginning of its name; all if empty.")

# name: model, keyword overrides, input options
WORKLOADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mlp, digits, batch 64": ("mlp", {}, {"dataset": "digits", "global_batch_size": 64}),
    "convnet, digits, batch 64": ("convnet", {}, {"dataset": "digits", "global_batch_size": 64}),
    "convnet, digits, batch 256": ("convnet", {}, {"dataset": "digits", "global_batch_size": 256}),
    "resnet18, 32x32, batch 16": ("resnet18", {}, {"dataset": "synthetic:32x32x3", "global_batch_size": 16}),
    "vit, 2 blocks, digits, batch 64": ("vit", {"depth": 2}, {"dataset": "digits", "global_batch_size": 64}),
    "transformer_lm_tiny, 8x128": ("transformer_lm_tiny", {}, {"dataset": "text", "global_batch_size": 8}),
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def contenders(workload: str, config: ExperimentConfig, runtime: tfpar.Runtime) -> dict[str, FrameworkLoop]:
    """The step with and without XLA, each with a model of its own."""
    name, overrides, options = WORKLOADS[workload]
    source = inputs.build_source(InputConfig(**options), "train")
    spec = tfpar.task_spec(source)

    def loop(jit_compile: bool) -> FrameworkLoop:
        trainer = tfpar.Trainer(
            lambda: models.build(name, spec, **overrides),
            "adamw",
            LOSS,
            config=config,
            runtime=runtime,
            jit_compile=jit_compile,
            schedule="constant",
            **options,
        )
        return FrameworkLoop(trainer, source)

    return {"XLA": loop(True), "without": loop(False)}


def main(_: list[str]) -> None:
    config = flags.experiment_config()
    runtime = tfpar.initialize(config)
    print(describe_machine())
    print(f"precision {config.precision.precision}, ms per step, median of {ROUNDS.value}; ratios within rounds\n")
    print(f"{'':34}{'XLA':>9}{'without':>10}{'ratio':>8}{'first steps, s: XLA':>22}{'without':>10}")
    for workload in WORKLOADS:
        if ONLY.value and not workload.startswith(ONLY.value):
            continue
        keras.utils.clear_session(free_memory=True)
        times, first = take_turns(contenders(workload, config, runtime), ROUNDS.value, SECONDS.value)
        with_xla, without = times["XLA"], times["without"]
        ratio = statistics.median(own / other for own, other in zip(with_xla, without, strict=True))
        row = f"{workload:34}{statistics.median(with_xla):9.3f}{statistics.median(without):10.3f}{ratio:8.2f}"
        print(f"{row}{first['XLA']:22.1f}{first['without']:10.1f}", flush=True)


if __name__ == "__main__":
    flags.run(main)

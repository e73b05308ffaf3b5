"""What the framework's step costs: tfpar against a hand-written loop and against Keras `fit`.

All three train the same model with the same optimizer, batch, precision and XLA setting, on the same batches, taking
turns in one process; a turn is long enough to time, and the median of the turns counts.

- hand-written: a `tf.function` that loops over `next(iterator)`, forward, backward and `optimizer.apply` in one jitted
  function. No loss over examples, no sidecar, no norms, no finite check.
- fit: `model.fit` as it comes.
- tfpar: `Trainer`'s step, everything on.

  python experiments/benchmarks/step_overhead.py --precision=float32 --xla=true
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from experiments.benchmarks.loops import FrameworkLoop, take_turns
from tfpar import inputs, models
from tfpar.config import ExperimentConfig, InputConfig, flags
from tfpar.doctor import describe_machine

import keras
import tensorflow as tf
from absl import flags as absl_flags

flags.define(sections=["precision"])
ROUNDS = absl_flags.DEFINE_integer("rounds", 7, "Turns of each contender; the median counts.", lower_bound=2)
SECONDS = absl_flags.DEFINE_float("seconds", 2.0, "Length of a turn.", lower_bound=0.1)
JIT = absl_flags.DEFINE_boolean("xla", True, "Compile forward, backward and update with XLA, in all three.")
ONLY = absl_flags.DEFINE_string("only", "", "One workload by name; all if empty.")

# name: model, keyword overrides, --dataset, other input options
WORKLOADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "small MLP, digits, batch 64": ("mlp", {}, {"dataset": "digits", "global_batch_size": 64}),
    "ResNet-18, 32x32, batch 16": (
        "resnet18",
        {"normalization": "batch"},
        {"dataset": "synthetic:32x32x3", "global_batch_size": 16},
    ),
    "byte LM tiny, 8x128": ("transformer_lm_tiny", {}, {"dataset": "text", "global_batch_size": 8}),
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def handwritten(model: keras.Model, data: tf.data.Dataset, jit_compile: bool) -> Callable[[int], None]:
    """The loop one would write by hand, with several steps a call."""
    optimizer = keras.optimizers.AdamW(1e-3)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=jit_compile)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def loop(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
        loss = tf.zeros([])
        for _ in tf.range(steps):
            loss = step(*next(iterator))
        return loss

    iterator = iter(data)
    return lambda steps: loop(iterator, tf.constant(steps)).numpy()


def fit(model: keras.Model, data: tf.data.Dataset, jit_compile: bool) -> Callable[[int], None]:
    """Keras' own loop. One epoch a turn; the iterator is made once."""
    model.compile(keras.optimizers.AdamW(1e-3), LOSS, jit_compile=jit_compile)
    return lambda steps: model.fit(data, epochs=1, steps_per_epoch=steps, verbose=0)


def contenders(workload: str, config: ExperimentConfig, runtime: tfpar.Runtime) -> dict[str, Callable[[int], Any]]:
    """The three loops for a workload, each with a model of its own."""
    name, overrides, options = WORKLOADS[workload]
    source = inputs.build_source(InputConfig(**options), "train")
    build = functools.partial(models.build, name, tfpar.task_spec(source), **overrides)
    trainer = tfpar.Trainer(
        build,
        "adamw",
        LOSS,
        config=config,
        runtime=runtime,
        jit_compile=JIT.value,
        schedule="constant",
        weight_decay=0.004,  # what Keras' AdamW does by default
        **options,
    )
    pipeline = trainer.program.pipeline(source, training=True)
    data = pipeline.dataset().map(lambda x, y, weight: (x[0], y[0])).prefetch(4)
    return {
        "hand-written": handwritten(build(), data, JIT.value),
        "fit": fit(build(), data, JIT.value),
        "tfpar": FrameworkLoop(trainer, source),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median of the ratios of each round, which what else the machine does in a round leaves alone; their quartiles."""
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.2f}-{high:.2f})"


def main(_: list[str]) -> None:
    config = flags.experiment_config()
    chosen = [workload for workload in WORKLOADS if workload.startswith(ONLY.value)]
    if not chosen:
        raise tfpar.ConfigError(f"--only={ONLY.value}: no workload has this name; there are: {'; '.join(WORKLOADS)}.")
    runtime = tfpar.initialize(config)
    print(describe_machine())
    print(
        f"precision {config.precision.precision}, XLA {'on' if JIT.value else 'off'}, "
        f"ms per step, median of {ROUNDS.value}; ratios (quartiles) "
        "within rounds\n"
    )
    print(f"{'':30}{'hand-written':>14}{'fit':>10}{'tfpar':>10}{'/ hand-written':>22}{'/ fit':>22}")
    for workload in chosen:
        keras.utils.clear_session(free_memory=True)
        times = take_turns(contenders(workload, config, runtime), ROUNDS.value, SECONDS.value)[0]
        row = "".join(
            f"{statistics.median(times[name]):{width}.3f}"
            for name, width in (("hand-written", 14), ("fit", 10), ("tfpar", 10))
        )
        ratios = "".join(f"{ratio(times['tfpar'], times[name]):>22}" for name in ("hand-written", "fit"))
        print(f"{workload:30}{row}{ratios}", flush=True)


if __name__ == "__main__":
    flags.run(main)

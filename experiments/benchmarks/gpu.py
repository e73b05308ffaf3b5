"""What a step of a language model costs on a GPU, and the codecs as TensorFlow operations there.

Each setting trains in a process of its own, on tokens that are drawn beforehand. Memory is TensorFlow's peak of what
tensors of the steps occupy on the GPU, without the first two steps. The codecs are measured as bytes of a vector that
is encoded with its residual, beside a copy of the vector on the device.

  python experiments/benchmarks/gpu.py --model=transformer_lm_gpt2 --batch=8
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import tfpar
import tfpar_ops
from tfpar import inputs, models
from tfpar.config import flags
from tfpar.doctor import describe_machine

import numpy as np
from absl import flags as absl_flags

flags.define(sections=[])
MODEL = absl_flags.DEFINE_string("model", "transformer_lm_gpt2", "Model to train.")
BATCH = absl_flags.DEFINE_integer("batch", 8, "Examples in a step.", lower_bound=1)
LENGTH = absl_flags.DEFINE_integer("length", 1024, "Tokens of an example.", lower_bound=1)
VOCABULARY = absl_flags.DEFINE_integer("vocabulary", 50257, "Tokens of the vocabulary.", lower_bound=2)
STEPS = absl_flags.DEFINE_integer("measured_steps", 10, "Steps that are measured, after the first two.", lower_bound=1)
SETTINGS = absl_flags.DEFINE_list(
    "settings",
    ["", "precision=mixed_bfloat16", "recompute=blocks", "offload=optimizer"],
    "What differs from the defaults: option=value, joined by +.",
)
CODECS = absl_flags.DEFINE_list("codecs", ["bf16", "fp8", "int8", "int4", "sign"], "Codecs to measure.")
MEGABYTES = absl_flags.DEFINE_integer("megabytes", 400, "Size of the vector that is encoded.", lower_bound=1)
CHILD = absl_flags.DEFINE_string("child", None, "Internal: the setting that this process measures.")


def measure(setting: str) -> dict[str, float]:
    """Trains in this process: `seconds` of a step, `mib` of its tensors at the peak, and the `loss`."""
    import keras
    import tensorflow as tf

    chosen = dict(part.split("=", 1) for part in setting.split("+") if part)
    common = {"strategy": "one_device", "optimizer": "adamw", "schedule": "constant", "verbose": 0}
    config = tfpar.ExperimentConfig.from_flat_dict({"global_batch_size": BATCH.value, **common, **chosen})
    tokens = np.random.default_rng(0).integers(0, VOCABULARY.value, (4 * BATCH.value, LENGTH.value + 1), dtype=np.int32)
    source = inputs.from_arrays(tokens[:, :-1], tokens[:, 1:], num_classes=VOCABULARY.value)
    task = models.TaskSpec("language_model", (LENGTH.value,), "int32", VOCABULARY.value)
    trainer = tfpar.Trainer(
        lambda: models.build(MODEL.value, task),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
    )
    trainer.fit(source, steps=2)
    tf.config.experimental.reset_memory_stats("GPU:0")
    began = time.perf_counter()
    trainer.fit(source, steps=2)
    between = time.perf_counter()
    summary = trainer.fit(source, steps=2 + STEPS.value)  # what starts and ends a run takes as long in both
    seconds = (time.perf_counter() - between - (between - began)) / STEPS.value
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return {"seconds": seconds, "mib": peak / 2**20, "loss": float(summary["train_loss"])}


def codec_rates() -> dict[str, float]:
    """GB of the vector per second, by codec, and for `copy`."""
    import tensorflow as tf

    elements = MEGABYTES.value * 1_000_000 // 4
    with tf.device("GPU:0"):
        x = tf.Variable(tf.random.normal([elements]))
        residual = tf.Variable(tf.zeros([elements]))

        def rate(call: Any) -> float:
            compiled = tf.function(call, autograph=False)
            for _ in range(3):
                compiled()
            times = []
            for _ in range(5):
                tf.test.experimental.sync_devices()
                began = time.perf_counter()
                for _ in range(20):
                    compiled()
                tf.test.experimental.sync_devices()
                times.append((time.perf_counter() - began) / 20)
            return 4e-9 * elements / sorted(times)[2]

        found = {"copy": rate(lambda: residual.assign(x))}
        residual.assign(tf.zeros([elements]))
        for name in CODECS.value:
            codec = tfpar_ops.Codec(name)
            found[name] = rate(
                lambda codec=codec: tfpar_ops.encode_into(residual, [x.read_value()], codec).payload[0, :1]
            )
    return found


def in_child(setting: str) -> dict[str, Any]:
    """`measure`, or with `codecs` `codec_rates`, in a process of its own; `failed` is what it said if it failed."""
    command = [sys.executable, __file__, f"--child={setting}", *sys.argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-1500:]}
    return json.loads(done.stdout.splitlines()[-1])


def main(_: list[str]) -> None:
    """Measures every setting, then the codecs, and prints two tables."""
    if CHILD.value is not None:
        print(json.dumps(codec_rates() if CHILD.value == "codecs" else measure(CHILD.value)))
        return
    print(f"{MODEL.value}, batch {BATCH.value} x {LENGTH.value} tokens; {describe_machine()}")
    print(f"{'setting':<32}{'step ms':>10}{'tokens/s':>12}{'MiB':>10}{'loss':>10}")
    for setting in SETTINGS.value:
        found = in_child(setting)
        if "failed" in found:
            print(f"{setting or 'defaults':<32} failed: {found['failed']}", flush=True)
            continue
        rate = BATCH.value * LENGTH.value / found["seconds"]
        print(
            f"{setting or 'defaults':<32}{1e3 * found['seconds']:>10.1f}{rate:>12.0f}{found['mib']:>10.0f}"
            f"{found['loss']:>10.4f}",
            flush=True,
        )
    for name, rate in in_child("codecs").items():
        print(f"{name:<32}{rate if isinstance(rate, str) else round(rate)} GB/s of the vector")


if __name__ == "__main__":
    flags.run(main)

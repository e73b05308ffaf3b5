"""One worker of tests/training/test_segments.py: trains with `--jit_segments=auto`.

python -m tests.integration.scripts.auto_segments WORKDIR [slow]

With `slow`, the link is taken to carry 10 MB/s without delay, whatever was measured.
"""

from __future__ import annotations

import dataclasses
import sys

import tfpar
from tfpar import models
from tfpar.exchange.tuning import forecast
from tfpar.models import TaskSpec

import keras
import numpy as np

measure = forecast.measure.measure


def on_slow_link(*arguments):
    measured = measure(*arguments)
    link = dataclasses.replace(measured.link, latency=1e-4, bandwidth=1e7, handling=0.0)
    return dataclasses.replace(measured, link=link)


def build() -> keras.Model:
    spec = TaskSpec("language_model", (16,), "int32", 64)
    return models.build("transformer_lm_tiny", spec, width=128, depth=4, heads=4, dropout=0.0)


def main() -> None:
    workdir, *pretended = sys.argv[1:]
    if pretended == ["slow"]:
        forecast.measure.measure = on_slow_link
    trainer = tfpar.Trainer(
        build,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy="multi_worker",
        jit_compile=True,
        jit_segments="auto",
        exchange="int8:bucket_bytes=400000",
        global_batch_size=8,
        seed=1,
        workdir=workdir,
    )
    tokens = np.random.default_rng(0).integers(0, 64, [32, 17]).astype(np.int32)
    trainer.fit(tokens[:, :-1], tokens[:, 1:], steps=4)


if __name__ == "__main__":
    main()

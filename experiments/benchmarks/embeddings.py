"""Bytes and time of the gradient of an embedding: its rows, next to the dense tensor.

python -m tfpar.launch --workers=2 -- experiments/benchmarks/embeddings.py --vocabulary=50000 --width=64 --tokens=512

Tokens of a step are drawn by Zipf's law, as words are. Bytes are those of the formula and, beside them, those that the
loopback interface has counted, which is right where no other program uses it.
"""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable

import tfpar
from tfpar import ExperimentConfig
from tfpar.config import flags
from tfpar.doctor import describe_machine
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

import numpy as np
import tensorflow as tf
from absl import flags as absl_flags

_VOCABULARY = absl_flags.DEFINE_integer("vocabulary", 50_000, "Rows of the embedding.", lower_bound=2)
_WIDTH = absl_flags.DEFINE_integer("width", 64, "Elements of a row.", lower_bound=1)
_TOKENS = absl_flags.DEFINE_integer("tokens", 512, "Tokens of a worker in a step.", lower_bound=1)
_EXCHANGES = absl_flags.DEFINE_list("exchanges", ["none", "bf16", "int8", "int4"], "Exchanges to compare.")
_STEPS = absl_flags.DEFINE_integer("steps", 20, "Steps that are counted.", lower_bound=1)


def loopback_bytes() -> int:
    """Bytes that the loopback interface has carried since the machine started."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    (counts,) = [line.split(":")[1].split() for line in lines if line.strip().startswith("lo:")]
    return int(counts[8])


def timed(call: Callable[[int], object], steps: int) -> tuple[float, int]:
    """Median of the seconds of a call, and the bytes that went through the interface in all calls."""
    call(0)
    before, seconds = loopback_bytes(), []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        call(step)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), loopback_bytes() - before


def exchanging(spec: str, runtime: tfpar.Runtime, sparse: list[int]) -> tuple[tfpar.Exchange, Callable[[int], object]]:
    """An exchange of the embedding's gradient, and a function that carries out one step of it."""
    shape = [_VOCABULARY.value, _WIDTH.value]
    exchange = tfpar.Exchange(spec)
    exchange.build([tf.TensorSpec(shape)], strategy=runtime.strategy, sparse=sparse)

    @tf.function
    def reduce(values: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
        def replica_step() -> tf.Tensor:
            (mean,) = exchange.reduce([tf.IndexedSlices(values, tokens, tf.constant(shape))])
            return mean.values if isinstance(mean, tf.IndexedSlices) else mean

        return runtime.strategy.run(replica_step)

    def step(number: int) -> object:
        generator = np.random.default_rng([runtime.topology.worker, number])
        tokens = generator.zipf(1.2, 20 * _TOKENS.value)
        tokens = (tokens[tokens < _VOCABULARY.value])[: _TOKENS.value]
        values = generator.standard_normal((len(tokens), _WIDTH.value), np.float32)
        return reduce(tf.constant(values), tf.constant(tokens)).numpy()

    return exchange, step


def main(_: list[str]) -> None:
    config = ExperimentConfig.from_flat_dict({"strategy": "multi_worker"})
    runtime = strategies.build(choose_topology(config.strategy, tfpar.cluster.detect()))
    chief, workers = runtime.topology.worker == 0, runtime.topology.workers
    if chief:
        print(
            f"{_VOCABULARY.value:,} x {_WIDTH.value}, {_TOKENS.value} tokens, {workers} workers; {describe_machine()}"
        )
        print("exchange    gradient  sent by each  counted by lo     ms")
    for spec in _EXCHANGES.value:
        for name, sparse in (("table", []), ("rows", [0])):
            exchange, step = exchanging(spec, runtime, sparse)
            seconds, counted = timed(step, _STEPS.value)
            sent = exchange.traffic(workers, 0).wire_bytes
            if chief:
                each = counted / _STEPS.value / workers
                print(f"{spec:<12}{name:<8}{sent:>14,}{each:>15,.0f}{1e3 * seconds:>7.1f}", flush=True)


if __name__ == "__main__":
    flags.run(main)

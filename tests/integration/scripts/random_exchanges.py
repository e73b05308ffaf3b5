"""One worker of tests/integration/test_transport.py: random exchanges, in one operation and in steps.

python -m tests.integration.scripts.random_exchanges COUNT

Ends with an error where a bit differs.
"""

from __future__ import annotations

import sys

import tfpar
from tfpar import ExperimentConfig
from tfpar.collectives.tensorflow import TensorFlowGroup, world_group
from tfpar.exchange.algorithms.two_phase import TwoPhase
from tfpar.exchange.buckets import PendingAssigns
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology
from tfpar_ops import Codec
from tfpar_ops.formats import FORMATS

import numpy as np
import tensorflow as tf

KINDS = [name for name, entry in FORMATS.items() if not entry.keeps]


def random_codec(generator: np.random.Generator) -> Codec:
    kind = str(generator.choice(KINDS))
    options = {}
    if FORMATS[kind].scale != "none":
        options["block"] = int(2 ** generator.integers(6, 13))
    if FORMATS[kind].scale == "float":
        options["scale"] = str(generator.choice(["bf16", "float32"]))
    if FORMATS[kind].stochastic:
        options["rounding"] = str(generator.choice(["nearest", "stochastic"]))
    return Codec(kind, **options)


def random_shapes(generator: np.random.Generator) -> list[tf.TensorShape]:
    """Of one to four tensors with up to two million elements together, most of them few."""
    largest = 10 ** generator.uniform(0, 5.7)
    return [tf.TensorShape([int(generator.integers(1, largest + 2))]) for _ in range(generator.integers(1, 5))]


def exchanged(bucket: TwoPhase, tensors: list[tf.Tensor], step: int, *, later: bool) -> list[np.ndarray]:
    """Sums, norms and state of one exchange; `later`: the state changes afterwards."""
    pending: PendingAssigns | None = [] if later else None
    sums, norms = bucket.reduce(tensors, tf.constant(step, tf.int64), pending)
    for variable, value in pending or []:
        variable.assign(value)
    return [value.numpy() for value in (*sums, norms, *bucket.state.values())]


def compare(number: int, worker: int, workers: int) -> None:
    """One random bucket, exchanged twice."""
    generator = np.random.default_rng(number)  # the same on all workers
    codec, shapes, seed = random_codec(generator), random_shapes(generator), int(generator.integers(1 << 40))
    feedback = bool(generator.random() < 0.8)
    groups = world_group(workers, worker), TensorFlowGroup(tuple(range(workers)), worker, all_workers=True)
    buckets = [
        TwoPhase(codec, shapes, group, seed, f"b{number}", error_feedback=feedback, pipeline=True) for group in groups
    ]
    assert [bucket._pipelined is not None for bucket in buckets] == [True, False]
    own = np.random.default_rng([number, worker])
    for step in range(2):
        arrays = [
            own.standard_normal(shape).astype(np.float32) * np.float32(10.0 ** own.integers(-3, 4)) for shape in shapes
        ]
        if own.random() < 0.1:
            arrays[0][0] = np.nan
        tensors, later = [tf.constant(array) for array in arrays], bool(generator.random() < 0.5)
        over_gloo, over_tensorflow = (exchanged(bucket, tensors, step, later=later) for bucket in buckets)
        for one, other in zip(over_gloo, over_tensorflow, strict=True):
            # Equal bits, but for those of a NaN.
            np.testing.assert_array_equal(one, other, err_msg=f"{number}: {codec}, {shapes}, step {step}")


def main() -> None:
    config = ExperimentConfig.from_flat_dict({"strategy": "multi_worker", "transport": "gloo"})
    topology = strategies.build(choose_topology(config.strategy, tfpar.cluster.detect())).topology
    for number in range(int(sys.argv[1])):
        compare(number, topology.worker, topology.workers)
    print("all the same")


if __name__ == "__main__":
    main()

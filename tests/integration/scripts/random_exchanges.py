"""One worker of tests/integration/test_transport.py: random exchanges over both transports, in groups of any size.

python -m tests.integration.scripts.random_exchanges COUNT [FIRST]

Exchange number FIRST is the first of COUNT; all that is random in an exchange follows from its number. Ends with an
error, which has the number, where a bit differs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tfpar
from tfpar import ExperimentConfig
from tfpar.collectives.group import Group
from tfpar.collectives.tensorflow import TensorFlowGroup, new_group
from tfpar.exchange.algorithms.point_to_point import PointToPoint
from tfpar.exchange.algorithms.two_phase import TwoPhase
from tfpar.exchange.buckets import PendingAssigns
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology
from tfpar_ops import Codec
from tfpar_ops.formats import FORMATS

import numpy as np
import tensorflow as tf

KINDS = list(FORMATS)
MESSAGES = "binary_blocks", "ring"


def random_codec(generator: np.random.Generator) -> Codec:
    kind = str(generator.choice(KINDS))
    if FORMATS[kind].keeps:
        block = int(2 ** generator.integers(6, 13))
        return Codec(kind, block=block, keep=int(generator.integers(1, block // 8)))
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


def random_bucket(
    generator: np.random.Generator, codec: Codec, shapes: list[tf.TensorShape], groups: Sequence[Group], name: str
) -> list[TwoPhase | PointToPoint]:
    """The same bucket for each group; for the first one, two of three times, in one operation if that exists."""
    seed, feedback = int(generator.integers(1 << 40)), bool(generator.random() < 0.8)
    common = {"seed": seed, "name": name, "error_feedback": feedback}
    pattern = str(generator.choice(["two_phase", "two_phase", "two_phase", "all_gather", *MESSAGES]))
    if pattern in MESSAGES:
        return [PointToPoint(codec, shapes, group, pattern=pattern, **common) for group in groups]
    options = {"all_gather": pattern == "all_gather", "pipeline": bool(generator.random() < 2 / 3)}
    return [TwoPhase(codec, shapes, group, **common, **options) for group in groups]


def exchanged(bucket: TwoPhase | PointToPoint, tensors: list[tf.Tensor], step: int, *, later: bool) -> list[np.ndarray]:
    """Sums, norms and state of one exchange; `later`: the state changes afterwards."""

    def exchange() -> list[tf.Tensor]:
        pending: PendingAssigns | None = [] if later else None
        sums, norms = bucket.reduce(tensors, tf.constant(step, tf.int64), pending)
        with tf.control_dependencies([*sums, norms]):
            for variable, value in pending or []:
                variable.assign(value)
        return [*sums, norms]

    # Messages between two workers wait for each other: they need the executor of a function.
    traced = isinstance(bucket, PointToPoint)
    results = tf.function(exchange, autograph=False).get_concrete_function()() if traced else exchange()
    return [value.numpy() for value in (*results, *bucket.state.values())]


def compare(number: int, worker: int, workers: int) -> bool:
    """One random bucket, exchanged twice by each member of a random group; returns whether this worker is one."""
    generator = np.random.default_rng(number)  # the same on all workers
    members = sorted(generator.permutation(workers)[: generator.integers(2, workers + 1)].tolist())
    codec, shapes = random_codec(generator), random_shapes(generator)
    if worker not in members:
        return False
    groups = new_group(members, worker), TensorFlowGroup(tuple(members), members.index(worker))
    assert [type(group).__name__ for group in groups] == ["PipelinedGlooGroup", "TensorFlowGroup"]
    buckets = random_bucket(generator, codec, shapes, groups, f"b{number}")
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
            said = f"exchange {number}: {codec}, {type(buckets[0]).__name__}, {shapes}, members {members}, step {step}"
            np.testing.assert_array_equal(one, other, err_msg=said)
    return True


def main() -> None:
    config = ExperimentConfig.from_flat_dict({"strategy": "multi_worker", "transport": "gloo"})
    topology = strategies.build(choose_topology(config.strategy, tfpar.cluster.detect())).topology
    count, first = (int(text) for text in (*sys.argv[1:], "0")[:2])
    taken = sum(compare(number, topology.worker, topology.workers) for number in range(first, first + count))
    print(f"exchanges {first} to {first + count - 1}, of {taken} of which this worker is a member: all the same")


if __name__ == "__main__":
    main()

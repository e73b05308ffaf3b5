"""One worker of tests/integration/test_exchange.py: exchanges known gradients with every spec.

python -m tests.integration.scripts.exchange_sums OUTPUT_DIR DEVICES SPEC...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tfpar
from tests.integration.scripts import every_spec
from tfpar.exchange import registry
from tfpar.exchange import spec as specs

import numpy as np
import tensorflow as tf

SHAPES = [(37, 53), (7,), (129, 65), (3, 3, 16, 40), (2000,), (8, 9)]
STEPS = 6
EARLY = "early "  # before a spec: buckets leave before it is known that all gradients are finite
BAD_STEP = 3  # in which one replica has a NaN


def gradients(replica: int, step: int) -> list[np.ndarray]:
    """What a replica contributes at a step; sizes differ by tensor and replica."""
    generator = np.random.default_rng([replica, step])
    result = [
        (generator.standard_normal(shape) * 10.0 ** (index - 3) * (replica + 1)).astype(np.float32)
        for index, shape in enumerate(SHAPES)
    ]
    if step == BAD_STEP and replica == 0:
        result[2][5, 5] = np.nan
    return result


RETUNED = "auto:bucket_bytes=20000"  # changes its plan at some steps, as if the links had changed
PLANS = {0: "int4", 1: "sign:pattern=ring", 2: "int8:pattern=all_gather", 4: "none", 5: "int2"}


def plan_of_step(step: int) -> Callable[..., registry.TuningResult]:
    """In place of `auto.choose`: what the measurement would lead to is given."""

    def choose(spec: specs.Spec, elements: list[int], *_: Any) -> registry.TuningResult:
        return registry.TuningResult([specs.parse(PLANS[step])] * len(elements), f"plan of step {step}")

    return choose


def exchange_all(spec: str, runtime: tfpar.Runtime) -> dict[str, np.ndarray]:
    strategy, plan = runtime.strategy, runtime.topology
    early, spec = spec.startswith(EARLY), spec.removeprefix(EARLY)
    exchange = tfpar.Exchange(spec)
    tuned = 0  # step whose plan is in use
    if spec == RETUNED:
        auto = exchange._spec.algorithm
        given = dataclasses.replace(
            auto, measure=lambda *_: None, choose=lambda *arguments: plan_of_step(tuned)(*arguments)
        )
        exchange._spec = dataclasses.replace(exchange._spec, algorithm=given)
    exchange.build(
        [tf.TensorSpec(shape) for shape in SHAPES],
        workers=plan.workers,
        worker=plan.worker,
        strategy=strategy,
        overlap=early,
    )
    if early and plan.workers > 1:
        assert exchange.overlaps

    def traced():
        @tf.function(autograph=False)
        def reduce(stacked):
            def replica_step():
                context = tf.distribute.get_replica_context()
                local = context.replica_id_in_sync_group % plan.local_replicas
                return exchange.reduce([tf.gather(tensor, local) for tensor in stacked])

            return strategy.run(replica_step)

        return reduce

    reduce = traced()
    result: dict[str, np.ndarray] = {}
    first = plan.worker * plan.local_replicas
    for step in range(STEPS):
        if spec == RETUNED and step in PLANS:
            tuned = step
            assert exchange.retune() == (step > 0 and plan.workers > 1)
            reduce = traced()
        before = exchange.export()
        mine = [gradients(first + local, step) for local in range(plan.local_replicas)]
        means = reduce([tf.constant(np.stack(column)) for column in zip(*mine, strict=True)])
        for index, mean in enumerate(means):
            values = [value.numpy() for value in strategy.experimental_local_results(mean)]
            for value in values[1:]:
                np.testing.assert_array_equal(value, values[0])
            result[f"mean/{step}/{index}"] = values[0]
        if step == BAD_STEP:
            after = exchange.export()
            unchanged = all(np.array_equal(after[name], before[name]) for name in before)
            result["unchanged"] = np.array(unchanged)
    result |= {f"state/{name}": value for name, value in exchange.export().items()}
    traffic = exchange.traffic(plan.replicas, 0)
    result["traffic"] = np.array([traffic.payload_bytes, traffic.wire_bytes, traffic.dense_bytes])
    return result


if __name__ == "__main__":
    every_spec.main(exchange_all)

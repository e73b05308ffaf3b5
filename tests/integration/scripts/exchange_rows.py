"""One worker of tests/integration/test_exchange_rows.py: exchanges known rows with every spec.

python -m tests.integration.scripts.exchange_rows OUTPUT_DIR DEVICES SPEC...
"""

from __future__ import annotations

import functools

import tfpar
from tests.integration.scripts import every_spec

import numpy as np
import tensorflow as tf

TABLE, KERNEL, SMALL = (900, 6), (40, 40), (5,)
SHAPES = [KERNEL, TABLE, SMALL]
BAD_STEP = 3
STEPS = 6


def gradients(replica: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What a replica contributes at a step: kernel, the table's rows and their numbers, a small tensor.

    Rows repeat; at step 1 replica 0 has none; at steps 2 and 5 one replica has all; at BAD_STEP there is a NaN.
    """
    generator = np.random.default_rng([replica, step])
    rows = 30 + 10 * replica
    numbers = generator.integers(0, 20 + 5 * replica, rows) * 7
    if step == 1 and replica == 0:
        numbers = numbers[:0]
    if step in (2, 5) and replica == 1:
        numbers = np.arange(TABLE[0])
    values = generator.standard_normal((len(numbers), TABLE[1])).astype(np.float32) * np.float32(replica + 1)
    if step == BAD_STEP and replica == 0:
        values[2, 3] = np.nan
    others = [generator.standard_normal(shape).astype(np.float32) for shape in (KERNEL, SMALL)]
    return others[0], values, numbers, others[1]


def exchange_all(spec: str, runtime: tfpar.Runtime) -> dict[str, np.ndarray]:
    strategy, plan = runtime.strategy, runtime.topology
    exchange = tfpar.Exchange(spec)
    exchange.build([tf.TensorSpec(shape) for shape in SHAPES], strategy=strategy, sparse=[1])
    first = plan.worker * plan.local_replicas
    pairs = [tf.TensorSpec([None, TABLE[1]]), tf.TensorSpec([None], tf.int64)]
    signature = [[tf.TensorSpec(KERNEL), *pairs, tf.TensorSpec(SMALL)]] * plan.local_replicas

    @tf.function(input_signature=[signature], autograph=False)
    def reduce(replicas: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        def replica_step() -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            local = context.replica_id_in_sync_group % plan.local_replicas
            mine = [functools.partial(tf.nest.map_structure, tf.identity, given) for given in replicas]
            kernel, values, numbers, small = tf.switch_case(local, mine)
            table = tf.IndexedSlices(values, numbers, tf.constant(TABLE, tf.int64))
            mean = exchange.reduce([kernel, table, small])
            assert isinstance(mean[1], tf.IndexedSlices) == (plan.workers > 1)
            if isinstance(mean[1], tf.IndexedSlices):
                return [mean[0], mean[1].values, mean[1].indices, mean[2]]
            return [mean[0], mean[1], tf.range(TABLE[0], dtype=tf.int64), mean[2]]

        return strategy.run(replica_step)

    result: dict[str, np.ndarray] = {}
    sent = 0
    for step in range(STEPS):
        mine = [[tf.constant(part) for part in gradients(first + local, step)] for local in range(plan.local_replicas)]
        for name, mean in zip(("kernel", "values", "numbers", "small"), reduce(mine), strict=True):
            local = [value.numpy() for value in strategy.experimental_local_results(mean)]
            for value in local[1:]:
                np.testing.assert_array_equal(value, local[0])
            result[f"mean/{step}/{name}"] = local[0]
        # The mean over the exchanges so far; nothing was exchanged at a step that was not finite, with a codec.
        exchanges = step + 1 - (spec != "none" and step >= BAD_STEP)
        total = exchange.traffic(plan.replicas, 0).wire_bytes * exchanges
        result[f"sent/{step}"] = np.array(total - sent)
        sent = total
    return result | {f"state/{name}": value for name, value in exchange.export().items()}


if __name__ == "__main__":
    every_spec.main(exchange_all)

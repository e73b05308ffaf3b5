"""The exchange interface with its dense form, on logical devices. Real processes: tests/cluster."""

from __future__ import annotations

import json

from tests.integration.scripts import own_loop
from tests.own_process import printed
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError
from tfpar.exchange import DevicesOfReplica, Exchange, buckets
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.dense_reducer import DenseReducer
from tfpar.exchange.per_device import groups_of_places
from tfpar.exchange.reducer import LocalReducer, SharedMemoryReducer

import numpy as np
import pytest
import tensorflow as tf

SHAPES = [(3, 5), (7,), (), (2, 2, 2)]
PEAKS = """
import json
import tensorflow as tf
from tfpar.collectives.tensorflow import world_group
from tfpar.exchange import buckets
from tfpar.exchange import spec as specs
from tfpar.exchange.compressed import CompressedReducer
shape = tf.TensorShape([1 << 10, 1 << 10])
reducer = CompressedReducer(specs.parse("int4:sample_every=3"), [shape], world_group(2, 0), "/device:CPU:0", 0)

@tf.function(autograph=False)
def run(step):
    gradient = tf.random.stateless_uniform(shape, tf.stack([step, step]))  # no constant, which would stay in memory
    [given], [kept] = buckets.given_away([gradient], reducer._compares(step))
    total = tf.negative(given)  # in place, if nothing else needs its input
    with tf.control_dependencies([total]):
        return tf.reduce_sum(kept), tf.reduce_sum(total)

run(tf.constant(0, tf.int64))
peaks = {step: [] for step in range(4)}
for step in [*peaks] * 10:  # on a loaded machine, the branch may still hold the gradient when its sum is computed
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    kept, total = run(tf.constant(step, tf.int64))
    peaks[step].append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    assert kept == (-total if step in (0, 3) else 0.0)
print(json.dumps([*peaks.values()]))
"""


def strategy_of(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def gradients_of(replica):
    scale = 1.0 + tf.cast(replica, tf.float32)
    return [scale * tf.reshape(tf.range(np.prod(shape, dtype=int), dtype=tf.float32), shape) + 0.1 for shape in SHAPES]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [0, 8, 64, 1 << 20])
def test_mean_and_sidecar_are_exact_and_equal_on_every_replica(replicas, bucket_bytes, monkeypatch):
    """In buckets of the strategy's all-reduce or, where the exchange knows that devices share memory, in none."""
    monkeypatch.setattr(buckets, "DENSE_BUCKET_BYTES", bucket_bytes)
    strategy = strategy_of(replicas)
    exchange = Exchange("none")
    exchange.build([tf.TensorSpec(shape) for shape in SHAPES], strategy=None if bucket_bytes else strategy)

    @tf.function(autograph=False)
    def step():
        def replica_step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradients = gradients_of(replica)
            sums, sidecar = exchange.reduce_sums(gradients, tf.stack([1.0, tf.cast(replica, tf.float32)]))
            return exchange.reduce(gradients), sums, sidecar

        return strategy.run(replica_step)

    mean, sums, sidecar = step()
    total = sum(range(1, replicas + 1))
    for index, shape in enumerate(SHAPES):
        base = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
        for local in strategy.experimental_local_results(sums[index]):
            np.testing.assert_allclose(local, base * total + 0.1 * replicas, rtol=1e-6)
        for local in strategy.experimental_local_results(mean[index]):
            np.testing.assert_allclose(local, (base * total + 0.1 * replicas) / replicas, rtol=1e-6)
    for local in strategy.experimental_local_results(sidecar):
        np.testing.assert_array_equal(local, [replicas, sum(range(replicas))])


def test_the_loop_of_the_documentation_equals_one_replica():
    """Keras' `apply_gradients` would add up the means of the replicas."""
    found, expected = (own_loop.trained(strategy_of(replicas), "int4") for replicas in (2, 1))
    for value, one in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, one, rtol=1e-5, atol=1e-6)


def test_outside_a_replica_context_it_says_so():
    strategy = strategy_of(2)
    exchange = Exchange()
    exchange.build([tf.TensorSpec((2,))])
    with strategy.scope(), pytest.raises(RuntimeError, match=r"strategy\.run"):
        exchange.reduce([tf.zeros(2)])


def test_before_build_it_says_so():
    with pytest.raises(ValueError, match="build"):
        Exchange().reduce([tf.zeros(2)])


def test_a_gradient_that_is_none_is_named():
    exchange = Exchange("none")
    exchange.build([tf.TensorSpec([2]), tf.TensorSpec([3])])
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with pytest.raises(ValueError, match=r"the gradients \[1\] of 2 are None: .*UnconnectedGradients\.ZERO"):
        strategy.run(lambda: exchange.reduce([tf.ones([2]), None]))


def test_an_unknown_spec_is_refused():
    with pytest.raises(ConfigError, match=r"--exchange='nonne'.*none"):
        Exchange("nonne")


def test_traffic_counts_payload_and_wire():
    exchange = Exchange()
    exchange.build([tf.TensorSpec(shape) for shape in SHAPES])
    elements = 15 + 7 + 1 + 8
    assert exchange.traffic(1, 3).wire_bytes == 0
    traffic = exchange.traffic(4, 3)
    assert traffic.payload_bytes == 4 * (elements + 3)
    assert traffic.wire_bytes == 2 * 3 * traffic.payload_bytes // 4


GPU = "/job:worker/replica:0/task:0/device:GPU:0"


@pytest.mark.parametrize(
    ("spec", "replicas", "group", "reducer"),
    [
        ("none", 1, None, LocalReducer),
        ("int4", 1, None, LocalReducer),
        ("none", 2, None, SharedMemoryReducer),
        ("int4", 2, None, SharedMemoryReducer),  # within one worker nothing is compressed
        ("none", 1, world_group(2, 0), DenseReducer),
        ("none", 1, world_group(2, 0, GPU), DenseReducer),  # a group is asked for: not the strategy's all-reduce
        ("int4", 1, world_group(2, 0), CompressedReducer),
        ("powersgd", 1, world_group(2, 0), CompressedReducer),
    ],
)
def test_what_carries_an_exchange_out(spec, replicas, group, reducer):
    exchange = Exchange(spec)
    exchange.build([tf.TensorSpec((64, 64))], strategy=strategy_of(replicas), group=group)
    assert type(exchange._reducer) is reducer
    assert exchange.compresses == (reducer is CompressedReducer)
    assert bool(exchange.state) == (reducer is CompressedReducer)


def test_without_a_group_workers_choose_it():
    dense, compressed = Exchange("none"), Exchange("int4")
    for exchange in (dense, compressed):
        exchange.build([tf.TensorSpec((64, 64))], workers=2, worker=1)
    assert type(dense._reducer) is DenseReducer
    assert type(compressed._reducer) is CompressedReducer


@pytest.mark.parametrize(("built", "runs", "message"), [(1, 2, "for one replica and runs on 2"), (2, 1, None)])
def test_another_number_of_replicas_than_the_exchange_was_built_for(built, runs, message):
    exchange = Exchange()
    exchange.build([tf.TensorSpec((2,))], strategy=strategy_of(built))
    step = tf.function(lambda: strategy_of(runs).run(lambda: exchange.reduce([tf.ones(2)])), autograph=False)
    if message is None:  # the sum goes by the strategy that it runs under
        np.testing.assert_array_equal(step()[0], [1.0, 1.0])
        return
    with pytest.raises(RuntimeError, match=message):
        step()


@pytest.mark.parametrize("spec", ["none", "int4"])
def test_another_number_of_workers_than_the_exchange_was_built_for(spec):
    exchange = Exchange(spec)
    exchange.build([tf.TensorSpec((64, 64))], workers=3)
    with pytest.raises(RuntimeError, match="built for 3 workers and runs on 1: give build"):
        strategy_of(1).run(lambda: exchange.reduce([tf.ones((64, 64))]))


@pytest.mark.parametrize(("old", "new"), [("overlaps", "overlaps_backward"), ("leaves_first", "first_ready_indices")])
def test_former_names_still_work(old, new):
    exchange = Exchange("int4:bucket_bytes=20000")
    exchange.build([tf.TensorSpec((64, 64)), tf.TensorSpec((64, 64))], workers=2, overlap=True)
    with pytest.warns(DeprecationWarning, match=f"Exchange.{old} is deprecated; use {new}"):
        assert getattr(exchange, old) == getattr(exchange, new)
    assert exchange.first_ready_indices == [1]
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = exchange.unknown


def test_gradients_are_kept_only_for_the_steps_that_are_compared(tmp_path):
    """In all others, sums take their memory."""
    size = 4 << 20
    assert [round(min(found) / size) for found in json.loads(printed(tmp_path, PEAKS))] == [2, 1, 1, 2]


def test_groups_of_places_tell_devices_apart():
    """TensorFlow keeps the devices of a group until the process ends, and another model has other places."""
    devices = [f"/job:worker/replica:0/task:0/device:CPU:{index}" for index in range(3)]

    def members(*numbers: int, part: int = 0) -> list[tuple[int, ...]]:
        of_places = [devices[number] for number in numbers]
        places = DevicesOfReplica([[index] for index in numbers], [0] * len(numbers), of_places, parts=2, part=part)
        return [group.members for group in groups_of_places(world_group(2, 0), strategy_of(1), places)[1]]

    first, second, third = members(0, 1, 2)
    assert len({*first, *second, *third}) == 6
    assert members(2, 2, 0) == [third, third, first]
    assert not {*members(0, part=1)[0]} & {*first, *second, *third}

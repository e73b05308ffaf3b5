"""Residuals between runs: restored bit for bit, and not lost when the number of workers changes."""

from __future__ import annotations

import itertools
import math

from tfpar.config import ConfigError
from tfpar.exchange import Exchange
from tfpar.exchange.buckets import bucket_seed, rounding_seed
from tfpar.exchange.sharding.shards import ShardedVector, by_tensor, evenly
from tfpar_ops import Codec

import numpy as np
import pytest
import tensorflow as tf

SHAPES = [(37, 53), (7,), (129, 65), (3, 3, 16, 40)]
LARGE = 37 * 53 + 129 * 65 + 3 * 3 * 16 * 40
SIZES = [math.prod(shape) for shape in SHAPES]


def exchanges(spec: str, workers: int) -> list[Exchange]:
    """One per worker, as each of them would build it."""
    result = []
    for worker in range(workers):
        exchange = Exchange(spec)
        exchange.build([tf.TensorSpec(shape) for shape in SHAPES], workers=workers, worker=worker)
        result.append(exchange)
    return result


def fill(group: list[Exchange]) -> None:
    for worker, exchange in enumerate(group):
        generator = np.random.default_rng(worker)
        step, *residuals = exchange.state
        step.assign(17)
        for variable in residuals:
            variable.assign(generator.standard_normal(variable.shape).astype(np.float32))


def total_pending(group: list[Exchange]) -> np.ndarray:
    """Over the elements of all buckets, whatever the buckets and shards are."""
    states = [exchange.export() for exchange in group]
    buckets = []
    while f"{len(buckets)}/worker" in states[0]:
        name = f"{len(buckets)}"
        kept = np.sum([state[f"{name}/worker"] for state in states], axis=0, dtype=np.float64)
        if f"{name}/owner" in states[0]:
            kept += np.concatenate([state[f"{name}/owner"] for state in states])
        buckets.append(kept)
    return np.concatenate(buckets)


SPECS = ["int4", "int4:pattern=all_gather", "topk:0.01", "int4:bucket_bytes=20000", "sign", "sign:pattern=ring"]


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_workers_restore_their_own_bits(spec):
    old, new = exchanges(spec, 3), exchanges(spec, 3)
    fill(old)
    for worker, exchange in enumerate(new):
        exchange.restore(3, lambda rank: old[rank].export())
        expected = old[worker].export()
        actual = exchange.export()
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(actual[name], value)


@pytest.mark.parametrize("spec", ["int4", "sign:block=64", "int8:pattern=all_gather"])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 5), (5, 2)])
def test_residuals_survive_another_number_of_workers(spec, before, after):
    old, new = exchanges(spec, before), exchanges(spec, after)
    fill(old)
    for exchange in new:
        exchange.restore(before, lambda rank: old[rank].export())
    expected = total_pending(old)
    assert expected.shape == (LARGE,)
    assert np.linalg.norm(total_pending(new) - expected) <= 1e-6 * np.linalg.norm(expected)
    assert all(exchange.export()["step"] == 17 for exchange in new)


@pytest.mark.parametrize(
    ("before", "after"), [("int4", "sign:bucket_bytes=20000"), ("sign", "int4"), ("sign:block=64", "sign")]
)
def test_residuals_survive_another_codec_and_other_buckets(before, after):
    old, new = exchanges(before, 2), exchanges(after, 2)
    fill(old)
    for exchange in new:
        exchange.restore(2, lambda rank: old[rank].export())
    np.testing.assert_allclose(total_pending(new), total_pending(old), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("spec", "workers"), [("int4", 1), ("none", 1), ("none", 2), ("int4:warmup_steps=20", 1)])
@pytest.mark.parametrize("before", ["int4", "int4:min_elements=5000"])
def test_residuals_survive_where_nothing_is_encoded_any_more(before, spec, workers):
    old, new = exchanges(before, 3), exchanges(spec, workers)
    fill(old)
    for exchange in new:
        exchange.restore(3, lambda rank: old[rank].export())
    expected = total_pending(old)
    assert np.linalg.norm(total_pending(new) - expected) <= 1e-6 * np.linalg.norm(expected)
    # And once more: nothing of it is lost on the way back to a codec.
    again = exchanges(before, 2)
    for exchange in again:
        exchange.restore(workers, lambda rank: new[rank].export())
    assert np.linalg.norm(total_pending(again) - expected) <= 1e-6 * np.linalg.norm(expected)


# Of several replicas, XLA cannot hold what they exchange.
@pytest.mark.parametrize(("devices", "jit_compile"), [(1, False), (1, True), (2, False)])
def test_a_lone_worker_applies_residuals_in_its_first_step(devices, jit_compile):
    names = [f"CPU:{number}" for number in range(devices)]
    strategy = tf.distribute.MirroredStrategy(names) if devices > 1 else tf.distribute.OneDeviceStrategy(names[0])
    old = exchanges("int4", 2)
    fill(old)
    expected = total_pending(old)
    exchange = Exchange("int4")
    exchange.build([tf.TensorSpec(shape) for shape in SHAPES], strategy=strategy)
    exchange.restore(2, lambda rank: old[rank].export())

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(failed: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        def replica_step() -> list[tf.Tensor]:
            gradients = [tf.ones(shape) for shape in SHAPES]
            return exchange.reduce_sums(
                gradients, tf.stack([failed, count]), lambda sums: (sums[0] == 0) & (sums[1] > 0)
            )[0]

        return strategy.run(replica_step)

    def applied(failed: float, count: float = 1.0) -> np.ndarray:
        values = step(tf.constant(failed), tf.constant(count))
        sums = [strategy.experimental_local_results(value)[-1].numpy() for value in values]
        np.testing.assert_array_equal(sums[1], np.full(SHAPES[1], devices))  # small tensors have no residual
        return np.concatenate([sums[number].reshape(-1) for number in (0, 2, 3)]) - devices

    applied(1.0)
    applied(0.0, count=0.0)  # no example: no step
    np.testing.assert_allclose(total_pending([exchange]), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(applied(0.0), expected, rtol=1e-5, atol=1e-5)
    assert not total_pending([exchange]).any()
    assert not applied(0.0).any()
    assert not exchange.compresses


def test_residuals_of_another_model_are_refused():
    old = exchanges("int4", 2)
    other = Exchange("int4")
    other.build([tf.TensorSpec((64, 64))], workers=2, worker=0)
    with pytest.raises(ConfigError, match=f"{LARGE:,} elements; this exchange encodes tensors with 4,096"):
        other.restore(2, lambda rank: old[rank].export())


@pytest.mark.parametrize("worker", [0, 1])
def test_shards_of_other_tensors_are_refused_by_every_worker(worker):
    """Not by the one alone that would get the sum: the others would wait for it."""
    old, new = exchanges("int4", 2), Exchange("none")
    fill(old)
    shards = evenly([2, 3], SIZES, 2, block=1, bucket_bytes=1 << 20)
    new.build([tf.TensorSpec(shape) for shape in SHAPES], workers=2, worker=worker, shards=shards)
    with pytest.raises(ConfigError, match=f"{LARGE:,} elements; this exchange has shards of tensors with 14,145"):
        new.restore(2, lambda rank: old[rank].export())


def sharded(spec: str, workers: int, vectors: list[ShardedVector]) -> list[Exchange]:
    """One per worker, with sharded state."""
    found = [Exchange(spec) for _ in range(workers)]
    for worker, exchange in enumerate(found):
        exchange.build([tf.TensorSpec(shape) for shape in SHAPES], workers=workers, worker=worker, shards=vectors)
    return found


def test_all_workers_have_state_if_one_has_a_residual():
    """Or they would call collectives in another order, and count exchanges differently: the sum goes to worker 0."""
    old, new = exchanges("int4", 2), sharded("none", 2, evenly([0, 2, 3], SIZES, 2, block=1, bucket_bytes=1 << 20))
    fill(old)
    for exchange in new:
        exchange.restore(2, lambda rank: old[rank].export())
        assert len(exchange.state) == 2
    assert [exchange.export()["step"] for exchange in new] == [17, 17]
    np.testing.assert_allclose(total_pending(new), total_pending(old), rtol=1e-6, atol=1e-6)
    again = exchanges("int4", 2)
    for exchange in again:
        exchange.restore(2, lambda rank: new[rank].export())
        assert exchange.export()["step"] == 17
    empty = sharded("none", 2, evenly([0, 2, 3], SIZES, 2, block=1, bucket_bytes=1 << 20))
    for exchange in empty:
        exchange.restore(2, lambda rank: exchanges("int4", 2)[rank].export())
        assert exchange.export() == {}


@pytest.mark.parametrize("worker", [0, 1])
def test_a_residual_that_shards_would_lose_is_refused_by_every_worker(worker):
    old, vectors = exchanges("int4", 2), evenly([0, 2, 3], SIZES, 2, block=512, bucket_bytes=1 << 20)
    fill(old)
    with pytest.raises(ConfigError, match="error_feedback=false would lose"):
        sharded("int8:error_feedback=false", 2, vectors)[worker].restore(2, lambda rank: old[rank].export())


@pytest.mark.parametrize("workers", [2, 3])
def test_vectors_in_another_order_get_the_residuals_of_their_tensors(workers):
    """As where a model axis divides some of the weights of an optimizer that needs whole tensors."""
    vectors = [*by_tensor([2], SIZES, 2, block=512), *by_tensor([0, 3], SIZES, 2, block=512)]
    old, new = exchanges("int8", workers), sharded("int4", 2, vectors)
    fill(old)
    expected = total_pending(old)
    for exchange in new:
        exchange.restore(workers, lambda rank: old[rank].export())
    by_tensor_index = dict(zip((0, 2, 3), np.split(expected, [SIZES[0], SIZES[0] + SIZES[2]]), strict=True))
    for one in new[0]._reducer._shards:
        [residual] = one.state.values()
        for index, part in one.vector.parts(residual.numpy()).items():
            np.testing.assert_allclose(part, by_tensor_index[index], rtol=1e-6, atol=1e-6)
    same, back = sharded("int4", 2, vectors), exchanges("int8", workers)
    for exchange in same:
        exchange.restore(2, lambda rank: new[rank].export())
    for one, other in zip(same, new, strict=True):
        for found, value in zip(one.state, other.state, strict=True):
            np.testing.assert_array_equal(found, value)
    for exchange in back:
        exchange.restore(2, lambda rank: new[rank].export())
    np.testing.assert_allclose(total_pending(back), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", None),
        ("step", np.array(-1, np.int64)),
        ("step", np.zeros(3, np.int64)),
        ("0/worker", np.zeros(LARGE + 1, np.float32)),
        ("0/worker", np.zeros((1, LARGE), np.float32)),
        ("0/worker", np.zeros(LARGE, np.float64)),
        ("0/worker", np.full(LARGE, np.nan, np.float32)),
        ("0/owner", np.zeros(LARGE, np.float32)),
        ("0/layout", None),
        ("0/layout", np.array([-1, 2, 0], np.int64)),
        ("0/layout", np.zeros(2, np.int64)),
        ("../x", np.zeros(1, np.float32)),
    ],
)
def test_state_that_no_exchange_exports_is_refused(workers, name, value):
    old, new = exchanges("int4", 2), exchanges("int4", workers)
    fill(old)
    state = {**old[0].export(), name: value}
    state = {key: array for key, array in state.items() if array is not None}
    with pytest.raises(ConfigError, match=r"exchange state of worker 0 is not what an exchange saves"):
        new[0].restore(2, lambda rank: state)


def test_a_run_without_residuals_restores_nothing():
    exchange = exchanges("int4", 2)[0]
    exchange.restore(2, lambda rank: {})
    assert all(not np.any(variable.numpy()) for variable in exchange.state)


def test_within_one_worker_there_is_nothing_to_keep():
    exchange = exchanges("int4", 1)[0]
    assert not exchange.compresses
    assert exchange.state == []
    assert exchange.export() == {}
    assert "not in use" in exchange.describe()


@pytest.mark.parametrize(("before", "after"), [("int8", "topk:0.01"), ("int8", "bf16"), ("topk:0.01", "sign:block=64")])
@pytest.mark.parametrize("workers", [2, 5, 8, 16])
def test_workers_without_a_shard_decide_as_the_others_do(before, after, workers):
    """A bucket of fewer blocks than workers: some own nothing, before and after, and must not think nothing changed."""

    def group(spec: str) -> list[Exchange]:
        made = [Exchange(spec) for _ in range(workers)]
        for worker, exchange in enumerate(made):
            exchange.build([tf.TensorSpec((32, 64))], workers=workers, worker=worker)
        return made

    old, new = group(before), group(after)
    fill(old)
    for exchange in new:
        exchange.restore(workers, lambda rank: old[rank].export())
    np.testing.assert_allclose(total_pending(new), total_pending(old), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["powersgd:40", "int4:min_elements=100000", "int4:error_feedback=false"])
def test_residuals_that_do_not_fit_are_refused(spec):
    old, new = exchanges("int8", 3), exchanges(spec, 3)
    fill(old)
    with pytest.raises(ConfigError, match="not been applied yet"):
        new[0].restore(3, lambda rank: old[rank].export())


def test_every_bucket_has_its_own_rounding_seed():
    assert len({bucket_seed(seed, number) for seed in range(20) for number in range(20)}) == 400
    assert all(0 <= bucket_seed(seed, 0) < 1 << 51 for seed in (0, 2**52, 2**63 - 1))


def test_every_encoding_has_its_own_rounding_seed():
    """Those of more workers than one seed has numbers for run into no other bucket's, even if seeds are neighbours."""
    codec, step = Codec("int8", rounding="stochastic"), tf.constant(7, tf.int64)

    def seeds(seed: int, streams: range) -> list[int]:
        found = [rounding_seed(codec, seed, stream, step).numpy().tolist() for stream in streams]
        assert all(second == 7 for _, second in found)
        return [first for first, _ in found]

    first = bucket_seed(0, 0)
    assert seeds(first, range(2)) == [first << 12, (first << 12) + 1]
    last = 2**51 - 1
    ranges = [seeds(seed, range(0, 65 * 64, 16)) for seed in (first, first + 1, last)]
    assert len({*itertools.chain(*ranges)}) == sum(map(len, ranges))

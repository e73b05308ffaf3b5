"""Agreement between workers that logical devices stand for. Real ones: tests/integration/test_agreement.py."""

from __future__ import annotations

import concurrent.futures
import itertools
import re
import tracemalloc

from tfpar.collectives import agreement
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import TensorFlowGroup, new_group, world_group
from tfpar.config import ConfigError

import numpy as np
import pytest
import tensorflow as tf

_first_members = itertools.count(1000, 100)  # the runtime remembers groups while the process lives


class Workers:
    """Workers of one process, each a logical CPU device with a thread."""

    def __init__(self, monkeypatch, count: int) -> None:
        members = range(first := next(_first_members), first + count)
        self.agreements = [WorkerAgreement(new_group(members, worker)) for worker in members]
        ranks = {id(one._group): rank for rank, one in enumerate(self.agreements)}

        def on_own_device(method):
            def call(group, *arguments, **keywords):
                with tf.device(f"CPU:{ranks[id(group)]}"):
                    return method(group, *arguments, **keywords)

            return call

        for name in ("all_gather", "send", "receive"):
            monkeypatch.setattr(TensorFlowGroup, name, on_own_device(getattr(TensorFlowGroup, name)))

    def call(self, name: str, values: list, *others: object) -> list:
        pairs = list(zip(self.agreements, values, strict=True))
        with concurrent.futures.ThreadPoolExecutor(len(values)) as pool:
            calls = [pool.submit(getattr(one, name), value, *others) for one, value in pairs]
            return [call.result(timeout=300) for call in calls]


def random_bytes(length: int) -> bytes:
    return np.random.default_rng(length).bytes(length)


def test_a_single_worker_needs_no_collective(monkeypatch):
    monkeypatch.setattr(TensorFlowGroup, "all_gather", None)
    monkeypatch.setattr(TensorFlowGroup, "send", None)
    alone = WorkerAgreement(world_group())
    assert alone.mean(0.1) == 0.1  # the same bits: not through float32
    assert np.isnan(alone.mean(float("nan")))
    assert alone.gather(-7) == [-7]
    assert alone.gather({"steps": np.int64(4), "rates": [np.float32(0.5), np.True_]}) == [
        {"steps": 4, "rates": [0.5, True]}
    ]
    assert alone.gather_bytes(b"") == [b""]
    assert alone.all_equal([])
    assert alone.all_equal("anything")
    array = np.array([1.0, 2.5])
    np.testing.assert_array_equal(alone.sum_arrays(array), array)
    np.testing.assert_array_equal(alone.gather_arrays(array), [array])
    np.testing.assert_array_equal(alone.broadcast([array]), [array])


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 248, 1), (249, 0, 247), (5000, 3, 70_001), (1, 2, 3)])
def test_bytes_of_different_lengths(monkeypatch, lengths):
    """248 bytes fit in the first row; longer ones follow in pieces, here of at most 4 KiB."""
    monkeypatch.setattr(agreement, "_LARGEST_EXPONENT", 10)
    values = [random_bytes(length) for length in lengths]
    workers = Workers(monkeypatch, 3)
    for _ in range(2):  # call sites are used again
        assert workers.call("gather_bytes", values) == [values] * 3


def test_arrays_of_different_shapes_and_types(monkeypatch):
    arrays = [
        np.array([[np.nan, -0.0]], np.float32),
        np.array(7, np.int64),
        np.zeros([0, 3], tf.bfloat16.as_numpy_dtype),
    ]
    for gathered in Workers(monkeypatch, 3).call("gather_arrays", arrays):
        for array, expected in zip(gathered, arrays, strict=True):
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert array.tobytes() == expected.tobytes()


def test_sums_are_added_in_the_order_of_ranks(monkeypatch):
    workers = Workers(monkeypatch, 3)
    values = [1e16, 1.0, -1e16]
    assert workers.call("sums", [[value, 1.0] for value in values]) == [[(1e16 + 1.0) - 1e16, 3.0]] * 3
    assert workers.call("mean", [0.1, 0.2, 0.4]) == [(0.1 + 0.2 + 0.4) / 3] * 3


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        ([[5, 7], [5, 7]], True),
        ([[5, 7], [7, 5]], False),
        (["x" * 100_000, "x" * 100_000], True),
        (["x" * 100_000, "x" * 99_999 + "y"], False),
        ([1, True], False),
        ([0.1, 0.1], True),
        ([0.1, 0.1 + 1e-16], False),
        ([float("nan"), float("nan")], True),
        ([None, {}], False),
    ],
)
def test_equality(monkeypatch, values, equal):
    assert Workers(monkeypatch, 2).call("all_equal", values) == [equal] * 2


def test_workers_in_different_activities_are_named(monkeypatch):
    """Also where what they send would be taken for a value of the other call."""
    workers = Workers(monkeypatch, 3)
    first = workers.agreements[0]._group.members[0]
    workers.agreements = [
        each.during("predict()" if rank == 0 else "the hooks after step 12")
        for rank, each in enumerate(workers.agreements)
    ]
    text = (
        f"worker {first} is in predict(), while workers {first + 1}, {first + 2} are in the hooks after step 12. "
        "All workers must make these calls together"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        workers.call("gather", [[1]] * 3)
    errors = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(workers.agreements[0].gather_arrays, np.ones(100_000)),
            pool.submit(workers.agreements[1].gather, 2),
            pool.submit(workers.agreements[2].all_equal, 3),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=re.escape(text)) as caught:
                call.result(timeout=300)
            errors.append(str(caught.value))
    assert len(set(errors)) == 1


def test_an_activity_of_any_length_costs_no_further_call(monkeypatch):
    workers = Workers(monkeypatch, 2)
    calls = []
    inner = TensorFlowGroup.all_gather
    monkeypatch.setattr(TensorFlowGroup, "all_gather", lambda *given: calls.append(given) or inner(*given))
    workers.agreements = [each.during("ö" * 500) for each in workers.agreements]
    assert workers.call("gather_bytes", [b"x" * 248] * 2) == [[b"x" * 248] * 2] * 2
    assert len(calls) == 2  # one of each worker


@pytest.mark.parametrize("count", [2, 3, 4])
def test_broadcast_passes_the_bits_of_the_first_worker_on(monkeypatch, count):
    monkeypatch.setattr(agreement, "_LARGEST_EXPONENT", 10)
    workers = Workers(monkeypatch, count)
    arrays = [
        [
            np.random.default_rng(rank).standard_normal([33, 47]),
            np.array(rank, np.uint8),
            np.zeros([0, 2]),
            np.array([True]),
        ]
        for rank in range(count)
    ]
    for _ in range(2):
        for received in workers.call("broadcast", arrays):
            for array, expected in zip(received, arrays[0], strict=True):
                assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
                assert array.tobytes() == expected.tobytes()
    assert workers.call("broadcast", [[]] * count) == [[]] * count


@pytest.mark.parametrize(("count", "source"), [(2, 1), (3, 1), (4, 3)])
def test_any_worker_may_be_the_one_whose_bits_are_passed_on(monkeypatch, count, source):
    workers = Workers(monkeypatch, count)
    arrays = [[np.full([5, 3], rank, np.float32)] for rank in range(count)]
    for found in workers.call("broadcast", arrays, source):
        np.testing.assert_array_equal(found[0], arrays[source][0])


@pytest.mark.parametrize("stop", [0, 1, 256, 257, 1 << 24, (1 << 24) + 1, 100_000_000])
def test_pieces_cover_a_range_without_much_padding(stop):
    end, sizes = 0, []
    for start, exponent in agreement._pieces(0, stop):
        assert start == end
        sizes.append(4 << exponent)
        end += sizes[-1]
    assert end >= stop
    assert all(size == 1 << 24 for size in sizes[:-1])
    assert stop == 0 or sizes[-1] <= max(256, 2 * (stop - sum(sizes[:-1])) + 6)


def test_large_arrays_are_hardly_copied(monkeypatch):
    """A worker that gathers weights, or is sent them, needs little more memory than they take."""
    monkeypatch.setattr(agreement, "_LARGEST_EXPONENT", 16)
    workers, array = Workers(monkeypatch, 2), np.ones(1 << 21, np.float32)
    tracemalloc.start()
    try:
        for name, given, wholes in (("gather_arrays", array, 3), ("broadcast", [array], 1)):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            workers.call(name, [given, given])
            needed = tracemalloc.get_traced_memory()[1] - before
            assert needed < 2 * (wholes + 1) * array.nbytes, name
    finally:
        tracemalloc.stop()

"""Rows of embeddings between workers, for which logical devices stand. Real workers: tests/integration."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools

from tfpar.collectives import group as groups
from tfpar.collectives.tensorflow import new_group
from tfpar.exchange import Exchange
from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms.sparse_rows import SparseRows, densified, summed_by_row
from tfpar.exchange.buckets import WireBytes
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.gradients import as_float32

import numpy as np
import pytest
import tensorflow as tf

V = 200
DENSE_KEY = 1 << 24  # instance keys of dense sums, far from those that are allocated
_first_members = itertools.count(0, 10)  # the runtime remembers groups and their shapes while the process lives


class Workers:
    """Workers that exchange rows of some embeddings with each other.

    Args:
      monkeypatch: pytest's fixture.
      count: Number of workers.
      shapes: Shapes of the embeddings.
      dense: Bytes per element that a worker sends of a dense embedding, over 2 (N - 1) / N.
      half: Whether rows travel as bfloat16.
    """

    def __init__(self, monkeypatch, count: int, shapes: list[tuple[int, ...]], dense: float = 4.0, half: bool = False):
        self.count = count
        members = range(first := next(_first_members), first + count)
        self.groups = [new_group(members, worker) for worker in members]
        self.shapes = [tf.TensorShape(shape) for shape in shapes]
        share = 2 * (count - 1) / count
        wires = [
            WireBytes(int(dense * shape.num_elements()), int(share * dense * shape.num_elements()))
            for shape in self.shapes
        ]
        self.rows = []
        for group in self.groups:  # each counts its keys as if it were alone in its process
            monkeypatch.setattr(groups, "_instance_keys", groups.InstanceKeys())
            self.rows.append(
                SparseRows(
                    dict(enumerate(zip(self.shapes, wires, strict=True))), group, tf.bfloat16 if half else tf.float32
                )
            )
        signature = [(tf.TensorSpec([None, *shape[1:]]), tf.TensorSpec([None], tf.int64)) for shape in self.shapes]
        self._functions = [
            tf.function(functools.partial(self._sum, rank), input_signature=[signature], autograph=False)
            for rank in range(count)
        ]

    def _sum(self, rank: int, slices):
        with tf.device(f"CPU:{rank}"):
            dense = {
                index: functools.partial(self.groups[rank].all_reduce, instance=DENSE_KEY + index)
                for index in range(len(self.shapes))
            }
            mine = {index: summed_by_row(*pair) for index, pair in enumerate(slices)}
            return self.rows[rank].all_reduce(mine, dense)

    def sum(self, slices):
        """Each in a thread of its own, as workers are processes: a function runs calls one after the other."""
        with concurrent.futures.ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(lambda function, mine: function(mine), self._functions, slices))

    def check(self, slices, *, exact_rows: bool, tolerance: float = 1e-6) -> None:
        """Exchanges, and compares with the dense sum in float64."""
        results = self.sum([[(tf.constant(v), tf.constant(i)) for v, i in worker] for worker in slices])
        for index, shape in enumerate(self.shapes):
            expected = np.zeros(shape)
            touched = set()
            for worker in slices:
                values, indices = worker[index]
                np.add.at(expected, indices, values.astype(np.float64))
                touched |= set(indices.tolist())
            for result in results:
                values, indices = result[index]
                assert len(set(indices.numpy().tolist())) == len(indices)
                assert indices.dtype == tf.int64
                assert (set(indices.numpy().tolist()) == touched) or not exact_rows
                assert exact_rows or indices.numpy().tolist() == list(range(shape[0]))
                np.testing.assert_array_equal(values, results[0][index][0])
                np.testing.assert_array_equal(indices, results[0][index][1])
                scale = np.abs(expected).max(initial=1.0)
                np.testing.assert_allclose(
                    densified(result[index], shape), expected, rtol=tolerance, atol=tolerance * scale
                )


def slices_of(rng: np.random.Generator, rows: int, shape: tuple[int, ...], among: int | None = None):
    """Random rows; with fewer different indices than rows, some repeat."""
    indices = rng.integers(0, among or shape[0], rows) * ((shape[0] - 1) // max((among or shape[0]) - 1, 1))
    return rng.standard_normal((rows, *shape[1:])).astype(np.float32), indices


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("half", [False, True])
def test_sums_equal_the_dense_ones(monkeypatch, workers, half):
    """Uneven numbers of rows, none at all on one worker, repeated ones, and several embeddings, one of rank 3."""
    shapes = [(V, 5), (V, 3, 2)]
    all_of_them = Workers(monkeypatch, workers, shapes, half=half)
    rng = np.random.default_rng(workers)
    for counts in ([0, 7, 30, 12], [1, 0, 0, 0], [0, 0, 0, 0], [20, 20, 20, 20]):
        slices = [[slices_of(rng, n, shape, among=9) for shape in shapes] for n in counts[:workers]]
        all_of_them.check(slices, exact_rows=True, tolerance=2e-2 if half else 1e-6)


@pytest.mark.parametrize("workers", [2, 3])
def test_all_rows_travel_dense(monkeypatch, workers):
    """One worker that has too many decides for all: whoever else has few."""
    all_of_them = Workers(monkeypatch, workers, [(V, 4)])
    every = np.random.default_rng(0).standard_normal((V, 4)).astype(np.float32), np.arange(V)
    few = np.ones((3, 4), np.float32), np.array([5, 5, 7])
    all_of_them.check([[every]] + [[few]] * (workers - 1), exact_rows=False)
    all_of_them.check([[few]] * workers, exact_rows=True)


def test_the_limit_is_where_rows_are_no_longer_less(monkeypatch):
    """Two workers, 7 elements: a row is 32 bytes, all of them send 5,600; 174 rows are less, 175 are not."""
    all_of_them = Workers(monkeypatch, 2, [(V, 7)])
    for rows, exact in ((174, True), (175, False)):
        mine = np.ones((rows, 7), np.float32), np.arange(rows)
        nothing = np.zeros((0, 7), np.float32), np.arange(0)
        before = all_of_them.rows[0].wire_bytes()
        all_of_them.check([[mine], [nothing]], exact_rows=exact)
        if exact:
            assert before == WireBytes(5600, 5600)  # nothing measured yet
            assert all_of_them.rows[0].wire_bytes() == WireBytes(174 * 32 + 4, 174 * 32 + 4)
    assert all_of_them.rows[1].wire_bytes() == WireBytes((174 * 32 + 5600) // 2 + 4, (174 * 32 + 5600) // 2 + 4)


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 100, 128, 150])
def test_padding_is_small_and_counted(monkeypatch, rows):
    all_of_them = Workers(monkeypatch, 3, [(2000, 4)])
    mine = np.ones((rows, 4), np.float32), np.arange(rows)
    all_of_them.check([[mine], [(mine[0][:1], mine[1][:1])], [mine]], exact_rows=True)
    sent = all_of_them.rows[2].wire_bytes().sent - 2 * 4
    padded = sent / (2 * 20)
    assert padded in (16, 18, 104, 128, 160)
    assert rows <= padded <= max(16, 1.125 * rows)


def test_a_dense_gradient_cheaper_than_a_row_travels_dense(monkeypatch):
    """As with powersgd: then nothing is told, and nothing travels as rows."""
    all_of_them = Workers(monkeypatch, 2, [(V, 5), (V, 5)], dense=0.02)
    assert all_of_them.rows[0].indices == []
    assert all_of_them.rows[0].wire_bytes() == WireBytes(0, 0)


def test_what_is_not_finite_reaches_every_worker(monkeypatch):
    all_of_them = Workers(monkeypatch, 2, [(V, 2)])
    values = np.array([[np.nan, 1.0], [2.0, np.inf]], np.float32)
    result = all_of_them.sum([[(tf.constant(values), tf.constant([3, 4], tf.int64))]] * 2)
    for rows in result:
        found = densified(rows[0], tf.TensorShape([V, 2])).numpy()
        assert np.isnan(found[3, 0])
        assert np.isinf(found[4, 1])
        assert np.isfinite(np.delete(found, [3, 4], axis=0)).all()


def test_repeated_rows_add_up():
    values, indices = summed_by_row(tf.constant([[1.0], [2.0], [4.0]], tf.float16), tf.constant([7, 3, 7]))
    np.testing.assert_array_equal(indices, [7, 3])
    np.testing.assert_array_equal(values, [[5.0], [2.0]])
    assert values.dtype == tf.float32


# The interface


def test_a_single_worker_and_other_variables_stay_dense():
    exchange = Exchange("none")
    exchange.build([tf.TensorSpec([4, 2])], sparse=[0])
    assert exchange.sparse == []
    (mean,) = exchange.reduce([tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), tf.constant([4, 2]))])
    np.testing.assert_array_equal(mean, [[0, 0], [2, 2], [0, 0], [0, 0]])


@pytest.mark.parametrize("sparse", [[1], [-1], [2]])
def test_indices_of_variables_without_rows_are_refused(sparse):
    with pytest.raises(ValueError, match="not all are indices, from 0, of variables that have rows"):
        Exchange().build([tf.TensorSpec([4, 2]), tf.TensorSpec([])], sparse=sparse)


@pytest.mark.parametrize("spec", ["none", "int4", "bf16", "powersgd:2", "topk:0.1,momentum=0.9"])
def test_traffic_counts_embeddings_as_dense_before_the_first_exchange(spec):
    shapes = [tf.TensorSpec([60_000, 16]), tf.TensorSpec([64, 64]), tf.TensorSpec([9])]
    plain, embeddings = Exchange(spec), Exchange(spec)
    plain.build(shapes, workers=3)
    embeddings.build(shapes, workers=3, sparse=[0])
    assert embeddings.sparse == ([] if "momentum" in spec else [0])
    ours, theirs = embeddings.traffic(3, 5), plain.traffic(3, 5)
    assert ours.dense_bytes == theirs.dense_bytes
    np.testing.assert_allclose(ours.payload_bytes, theirs.payload_bytes, rtol=0.01)  # padding
    np.testing.assert_allclose(ours.wire_bytes, theirs.wire_bytes, rtol=0.01)
    assert ours.pattern.endswith(", rows") == bool(embeddings.sparse)


def test_an_embedding_has_its_own_bucket_in_its_place():
    """Residuals lie in the order of the variables, whether or not rows may travel."""
    shapes = [tf.TensorSpec([64, 64]), tf.TensorSpec([3000, 16]), tf.TensorSpec([64, 64]), tf.TensorSpec([64, 32])]
    saved = []
    for worker in range(2):
        exchange = Exchange("int4")
        exchange.build(shapes, workers=2, worker=worker, sparse=[1])
        state = exchange.export()
        for number in range(3):
            state[f"{number}/worker"][:] = (number + 1) * (worker == 0)
        saved.append(state)
    elements = [int(saved[0][f"{number}/layout"][0]) for number in range(3)]
    assert elements == [64 * 64, 3000 * 16, 64 * 64 + 64 * 32]
    plain = Exchange("int4")
    plain.build(shapes, workers=2)
    plain.restore(2, saved.__getitem__)
    np.testing.assert_array_equal(plain.export()["0/worker"], np.repeat([1.0, 2.0, 3.0], elements))


def test_workers_that_send_different_numbers_of_bytes_choose_the_same(monkeypatch):
    """With three workers in binary blocks, the last one sends two shards and the others three."""
    spec, shapes = specs.parse("int8:pattern=binary_blocks"), [tf.TensorShape([5000, 16]), tf.TensorShape([64, 64])]
    members = range(first := next(_first_members), first + 3)
    chosen = []
    for worker in members:
        monkeypatch.setattr(groups, "_instance_keys", groups.InstanceKeys())
        group = new_group(members, worker)
        rows = CompressedReducer(spec, shapes, group, "CPU:0", 0, sparse=[0])._rows
        sizes = [each.sizes.tolist() for each in rows._embeddings.values()]
        chosen.append((rows.wire_bytes().sent, sizes, groups.allocate_instance_keys(1, group)))
    sent, sizes, keys = zip(*chosen, strict=True)
    assert sent[0] == sent[1] == 1.5 * sent[2]
    assert sizes[0] == sizes[1] == sizes[2]
    assert keys[0] == keys[1] == keys[2]


def test_rows_that_do_not_travel_keep_the_shape_of_their_table():
    """Also where their number is not known: the length of a message follows from it."""
    shape = tf.TensorShape([5, 3])

    @tf.function(
        input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64), tf.TensorSpec([2], tf.int64)]
    )
    def program(values, indices, of_table):
        (gradient,) = as_float32([tf.IndexedSlices(values, indices, of_table)], [shape], ())
        assert gradient.shape == shape
        return gradient

    found = program(tf.ones([2, 3]), tf.constant([1, 1], tf.int64), tf.constant([5, 3], tf.int64))
    assert found.numpy().sum(axis=1).tolist() == [0.0, 6.0, 0.0, 0.0, 0.0]

"""The pipeline: each example once an epoch, the same order computed eagerly and in the graph, resumable anywhere."""

from __future__ import annotations

import dataclasses
import itertools
import math

from tests.inputs.helpers import CLASSES, index_source
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, epoch_order, locate_bad_example

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st


def config(batch: int, **options) -> InputConfig:
    return InputConfig(global_batch_size=batch, **{"uneven_batches": True, **options})


def epoch_indices(pipeline: Pipeline, epoch: int = 0) -> list[np.ndarray]:
    first = epoch * pipeline.steps_per_epoch
    return [pipeline.indices(first + step, 1)[0] for step in range(pipeline.steps_per_epoch)]


def real(batches) -> list[int]:
    joined = np.concatenate([batch.ravel() for batch in batches])
    return joined[joined >= 0].tolist()


def expected_positions(
    examples: int, batch: int, micro_batches: int, replicas: int, step: int
) -> list[list[list[int]]]:
    """Positions per micro-batch and replica, by the definition, without arrays."""
    first = step * batch
    count = min(batch, examples - first)
    result = []
    for a in range(micro_batches):
        micro = list(range(first + a * count // micro_batches, first + (a + 1) * count // micro_batches))
        bounds = [r * len(micro) // replicas for r in range(replicas + 1)]
        result.append([micro[low:high] for low, high in itertools.pairwise(bounds)])
    return result


layouts = st.fixed_dictionaries(
    {
        "examples": st.integers(1, 80),
        "batch": st.integers(1, 40),
        "micro_batches": st.integers(1, 5),
        "replicas": st.integers(1, 6),
        "remainder": st.sampled_from(["pad", "drop"]),
        "shuffle": st.booleans(),
    }
)


@settings(max_examples=50, deadline=None)
@given(layout=layouts)
def test_each_example_occurs_once_per_epoch_in_its_place(layout):
    examples, batch = layout["examples"], min(layout["batch"], layout["examples"])
    micro_batches, replicas = layout["micro_batches"], layout["replicas"]
    options = config(batch, remainder=layout["remainder"], shuffle=layout["shuffle"])
    pipeline = Pipeline(index_source(examples), options, accumulate_steps=micro_batches, replicas=replicas, seed=3)

    drop = layout["remainder"] == "drop"
    assert pipeline.steps_per_epoch == (examples // batch if drop else math.ceil(examples / batch))
    assert pipeline.micro_batch == math.ceil(math.ceil(batch / micro_batches) / replicas)
    assert pipeline.examples_per_epoch == (examples // batch * batch if drop else examples)

    batches = epoch_indices(pipeline, epoch=1)
    seen = real(batches)
    assert len(seen) == len(set(seen)) == pipeline.examples_per_epoch
    assert set(seen) <= set(range(examples))
    for step, got in enumerate(batches):
        assert got.shape == (micro_batches, replicas, pipeline.micro_batch)
        for a, shares in enumerate(expected_positions(examples, batch, micro_batches, replicas, step)):
            for r, share in enumerate(shares):
                row = got[a, r]
                assert (row >= 0).tolist() == [slot < len(share) for slot in range(len(row))]
                if not layout["shuffle"]:
                    assert row[: len(share)].tolist() == share


@pytest.mark.parametrize(
    ("examples", "batch", "micro_batches", "replicas", "workers"),
    [(23, 8, 1, 1, 1), (23, 8, 2, 2, 1), (23, 8, 2, 4, 2), (50, 7, 3, 2, 2), (50, 10, 1, 6, 3), (5, 5, 4, 4, 4)],
)
def test_the_graph_and_eager_code_compute_the_same_order(
    examples, batch, micro_batches, replicas, workers, monkeypatch
):
    # Small chunks, so that the steps here span several chunks.
    monkeypatch.setattr("tfpar.inputs.pipeline._INDICES_PER_CALL", 2 * batch)
    pipeline = Pipeline(
        index_source(examples),
        config(batch),
        accumulate_steps=micro_batches,
        replicas=replicas,
        workers=workers,
        seed=11,
    )
    local = replicas // workers
    steps = 2 * pipeline.steps_per_epoch + 1
    for worker in range(workers):
        dataset = pipeline.dataset(worker, local)
        assert dataset.element_spec == pipeline.element_spec
        assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        elements = dataset.take(steps * local).as_numpy_iterator()
        for step in range(steps):
            on_host = pipeline.indices(step, 1)[0]
            for r in range(worker * local, (worker + 1) * local):
                x, y, weight = next(elements)
                wanted = on_host[:, r]
                assert np.array_equal(weight, (wanted >= 0).astype(np.float32))
                got = x[..., 0].astype(np.int64)
                assert np.array_equal(got[wanted >= 0], wanted[wanted >= 0])
                assert np.array_equal(x[..., 1], 2 * x[..., 0])
                assert np.array_equal(y, got % CLASSES)
                # Padding repeats an example of the same step.
                assert set(got.ravel()) <= set(on_host.ravel()) - {-1}


def test_micro_batches_do_not_depend_on_the_replicas():
    def sets(replicas: int, workers: int) -> list[list[set[int]]]:
        pipeline = Pipeline(
            index_source(53), config(16), accumulate_steps=3, replicas=replicas, workers=workers, seed=2
        )
        return [[set(real([micro])) for micro in batch] for batch in epoch_indices(pipeline, epoch=4)]

    reference = sets(1, 1)
    assert sum(map(len, reference[0])) == 16
    for replicas, workers in [(2, 1), (2, 2), (3, 1), (4, 2), (6, 3), (16, 4)]:
        assert sets(replicas, workers) == reference


@pytest.mark.parametrize("shard_by", ["example", "file"])
def test_resuming_continues_with_the_same_elements(shard_by):
    source = index_source(61, [20, 11, 30])
    pipeline = Pipeline(source, config(8, shard_by=shard_by), accumulate_steps=2, replicas=4, workers=2, seed=9)
    start, count = pipeline.steps_per_epoch + 3, 12
    whole = list(pipeline.dataset(1, 2).skip(start * 2).take(count).as_numpy_iterator())
    resumed = list(pipeline.dataset(1, 2, start_step=start).take(count).as_numpy_iterator())
    for a, b in zip(whole, resumed, strict=True):
        assert all(np.array_equal(left, right) for left, right in zip(a, b, strict=True))


def test_resuming_at_a_late_step_costs_nothing():
    """The first element after a billion steps is computed directly."""
    pipeline = Pipeline(index_source(10**9), config(64), replicas=1, seed=0)
    x, _, _ = next(pipeline.dataset(start_step=10**9).as_numpy_iterator())
    # Above 2^24, float32 does not represent the index exactly.
    assert np.array_equal(x[..., 0], pipeline.indices(10**9, 1)[0][0].astype(np.float32))


def test_order_depends_on_seed_and_epoch_only():
    def order(seed: int, epoch: int, batch: int = 10) -> list[int]:
        return real(epoch_indices(Pipeline(index_source(40), config(batch), seed=seed), epoch))

    assert order(0, 0) == order(0, 0) == order(0, 0, batch=7)
    assert order(0, 0) != order(0, 1) != order(0, 2)
    assert order(0, 0) != order(1, 0)
    unshuffled = Pipeline(index_source(40), config(10, shuffle=False), seed=0)
    assert real(epoch_indices(unshuffled, epoch=3)) == list(range(40))


@pytest.mark.parametrize(("workers", "local"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_evaluation_is_one_pass_in_order(workers, local):
    options = InputConfig(global_batch_size=8, remainder="drop", shard_by="file")
    pipeline = Pipeline(index_source(29), options, replicas=workers * local, workers=workers, training=False)
    assert pipeline.steps_per_epoch == 4
    seen: list[int] = []
    for worker in range(workers):
        dataset = pipeline.dataset(worker, local)
        assert dataset.cardinality() == 4 * local
        for x, _, weight in dataset.as_numpy_iterator():
            assert x.shape[0] == 1
            seen += x[..., 0][weight > 0].astype(int).tolist()
    assert sorted(seen) == list(range(29))
    assert real(epoch_indices(pipeline)) == list(range(29))
    rest = pipeline.dataset(0, local, start_step=3)
    assert rest.cardinality() == len(list(rest)) == local
    assert len(list(pipeline.dataset(0, local, start_step=4))) == 0


def test_evaluation_accepts_a_batch_larger_than_the_split():
    pipeline = Pipeline(index_source(5), InputConfig(global_batch_size=64), training=False)
    [(x, _, weight)] = list(pipeline.dataset().as_numpy_iterator())
    assert x.shape == (1, 64, 2)
    assert weight.sum() == 5


class TestFileShards:
    RECORDS = (9, 0, 30, 4, 12, 1, 25)

    def pipeline(self, workers: int, local: int = 1, batch: int = 6, **options) -> Pipeline:
        source = index_source(sum(self.RECORDS), self.RECORDS)
        return Pipeline(
            source, config(batch, shard_by="file", **options), replicas=workers * local, workers=workers, seed=5
        )

    @pytest.mark.parametrize(("workers", "local"), [(1, 1), (2, 1), (3, 2)])
    def test_the_worker_with_the_file_reads_each_example_once_per_epoch(self, workers, local):
        pipeline = self.pipeline(workers, local)
        ends = np.cumsum(self.RECORDS)
        owner: dict[int, int] = {}
        seen: list[int] = []
        for worker in range(workers):
            elements = pipeline.dataset(worker, local).take(pipeline.steps_per_epoch * local)
            for x, _, weight in elements.as_numpy_iterator():
                for index in x[..., 0][weight > 0].astype(int).tolist():
                    seen.append(index)
                    assert owner.setdefault(int(np.searchsorted(ends, index, side="right")), worker) == worker
                padding = x[..., 0][weight == 0].astype(int)
                assert {owner.get(int(file)) for file in np.searchsorted(ends, padding, side="right")} <= {worker}
        assert sorted(seen) == list(range(sum(self.RECORDS)))
        assert set(owner.values()) == set(range(workers))

    def test_eager_indices_agree_and_epochs_differ(self):
        pipeline = self.pipeline(workers=2, local=2)
        first, second = epoch_indices(pipeline, 0), epoch_indices(pipeline, 1)
        assert sorted(real(first)) == sorted(real(second)) == list(range(sum(self.RECORDS)))
        assert real(first) != real(second)
        for worker in range(2):
            elements = pipeline.dataset(worker, 2).take(2 * len(first)).as_numpy_iterator()
            for step, batch in enumerate(first):
                for r in (2 * worker, 2 * worker + 1):
                    x, _, weight = next(elements)
                    assert x[..., 0][weight > 0].astype(int).tolist() == real([batch[:, r]]), step

    def test_shards_are_balanced_and_uneven_workers_take_the_same_steps(self):
        shards = epoch_order.shards_by_file(self.RECORDS, 6, 3)
        assert sorted(shard.size for shard in shards) == [25, 26, 30]
        assert sum(shard.files for shard in shards) == 6
        assert self.pipeline(workers=3).steps_per_epoch == 15
        assert self.pipeline(workers=3, remainder="drop").steps_per_epoch == 12
        last = self.pipeline(workers=3).indices(14, 1)[0]
        assert sorted((last >= 0).sum(axis=(0, 2)).tolist()) == [0, 0, 2]

    def test_a_batch_may_be_indivisible_by_the_workers(self):
        pipeline = self.pipeline(workers=4, batch=7)
        assert [shard.batch for shard in epoch_order.shards_by_file(self.RECORDS, 7, 4)] == [1, 2, 2, 2]
        assert sorted(real(epoch_indices(pipeline))) == list(range(sum(self.RECORDS)))

    @pytest.mark.parametrize(
        ("source", "batch", "remainder", "message"),
        [
            (index_source(20), 6, "pad", r"--shard_by=file: index has no files\. Use --shard_by=example"),
            (index_source(20, (20, 0, 0)), 6, "pad", r"each of 3 workers.* has 1.*--shards=3"),
            (index_source(20, (10, 5, 5)), 2, "pad", r"--global_batch_size=2.* number of workers, 3"),
            (index_source(20, (18, 1, 1)), 9, "drop", r"--remainder=drop .* a worker has 1 examples"),
        ],
    )
    def test_unsuitable_files_and_batches_are_refused(self, source, batch, remainder, message):
        with pytest.raises(ConfigError, match=message):
            Pipeline(source, config(batch, shard_by="file", remainder=remainder), replicas=3, workers=3)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_batch_larger_than_the_training_split_takes_all_of_it(replicas):
    pipeline = Pipeline(index_source(62), InputConfig(global_batch_size=128, shuffle=False), replicas=replicas)
    assert (pipeline.steps_per_epoch, pipeline.micro_batch) == (1, -(-62 // replicas))
    assert pipeline.pads == (replicas > 1)
    found = pipeline.indices(1, 1)[0]
    assert sorted(found[found >= 0]) == list(range(62))
    assert "62 per step" in pipeline.report()
    assert "all examples, which are fewer than --global_batch_size=128" in pipeline.report()


class TestRefusals:
    def test_the_error_of_an_indivisible_batch_names_all_numbers(self):
        with pytest.raises(ConfigError) as caught:
            Pipeline(index_source(100), InputConfig(global_batch_size=50), replicas=4, accumulate_steps=3)
        message = str(caught.value)
        for part in ("--global_batch_size=50", "4 replicas", "3 micro-batches", "48 or 60", "--uneven_batches=true"):
            assert part in message

    def test_the_error_of_a_batch_below_the_replicas_names_the_next_size(self):
        with pytest.raises(ConfigError, match="nearest divisible sizes: 4;"):
            Pipeline(index_source(100), InputConfig(global_batch_size=3), replicas=4)

    def test_a_batch_larger_than_the_training_split_leaves_no_steps_without_the_remainder(self):
        with pytest.raises(ConfigError, match=r"--remainder=drop.*--global_batch_size=64 is more than the 63 examples"):
            Pipeline(index_source(63), InputConfig(global_batch_size=64, remainder="drop"))

    @pytest.mark.parametrize("training", [True, False])
    def test_an_empty_split_is_refused(self, training):
        with pytest.raises(ConfigError, match=r"--dataset=index: the train split is empty"):
            Pipeline(index_source(0), InputConfig(), training=training)

    def test_inconsistent_workers_and_replicas_are_refused(self):
        source, options = index_source(100), InputConfig(global_batch_size=12)
        with pytest.raises(ValueError, match="replicas=3 must be a positive multiple of workers=2"):
            Pipeline(source, options, replicas=3, workers=2)
        with pytest.raises(ValueError, match="1 for evaluation"):
            Pipeline(source, options, accumulate_steps=2, training=False)
        pipeline = Pipeline(source, options, replicas=4, workers=2)
        for arguments in [(2, 2), (-1, 2), (0, 4), (0, 2, -1)]:
            with pytest.raises(ValueError, match=r"worker=|start_step="):
                pipeline.dataset(*arguments)

    def test_a_label_out_of_range_in_a_file_is_located(self):
        source = index_source(20, storage="files")

        def read(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x, y = source.read(indices)
            return x, tf.where(indices == 13, tf.constant(7, tf.int64), y)

        broken = dataclasses.replace(source, read=read)
        pipeline = Pipeline(broken, InputConfig(global_batch_size=20, shuffle=False))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"labels outside \[0, 7\)"):
            next(iter(pipeline.dataset()))
        (bad,) = locate_bad_example(broken, pipeline.indices(0, 1).reshape(-1))
        assert (bad.index, bad.reason) == (13, "has label 7, but labels must be 0 to 6")


def test_the_report_says_which_worker_reads_what():
    source = index_source(61, [20, 11, 30])
    text = Pipeline(source, config(10), accumulate_steps=2, replicas=4, workers=2, seed=9).report()
    for part in (
        "61 in 3 files",
        "sharded by example",
        "2 workers",
        "10 per step = 2 micro-batches x 4 replicas x 2 examples, 6 of them padding",
        "7 steps; remainder=pad: the last has 1 of 10 examples",
        "from seed 9",
    ):
        assert part in text
    text = Pipeline(source, config(10, shard_by="file", augment="flip"), replicas=2, workers=2).report()
    assert "worker 0: 30 examples in 1 files; worker 1: 31 examples in 2 files" in text
    assert "flip, on the device" in text
    assert "workers that run out" in text
    assert "1 examples of the last batch are dropped" in Pipeline(source, config(10, remainder="drop")).report()
    assert "no remainder" in Pipeline(index_source(60), config(10)).report()
    evaluation = Pipeline(source, config(10, shard_by="file"), workers=2, replicas=2, training=False).report()
    assert "as stored, each example once" in evaluation
    assert "sharded by example" in evaluation


def test_the_report_lists_at_most_sixteen_workers():
    source = index_source(40, [2] * 20)
    text = Pipeline(source, config(20, shard_by="file"), replicas=20, workers=20).report()
    assert "worker 15" in text
    assert "worker 16" not in text
    assert "and 4 more" in text


def test_options_are_passed_to_tf_data():
    """Automatic sharding is off, the order is deterministic, and the thread pool has the configured size."""
    options = Pipeline(index_source(20, storage="files"), config(4, input_threads=3)).dataset().options()
    assert options.deterministic
    assert options.experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF
    assert options.threading.private_threadpool_size == 3


def test_each_replica_of_a_strategy_gets_its_own_elements():
    """Under distribute_datasets_from_function each replica receives its element."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    pipeline = Pipeline(index_source(30), config(6), replicas=2, seed=4)
    distributed = iter(strategy.distribute_datasets_from_function(lambda context: pipeline.dataset(0, 2)))
    for step in range(7):
        per_replica = strategy.experimental_local_results(next(distributed))
        got = [x[..., 0].numpy().astype(int).tolist() for x, _, _ in per_replica]
        assert got == pipeline.indices(step, 1)[0].transpose(1, 0, 2).tolist()

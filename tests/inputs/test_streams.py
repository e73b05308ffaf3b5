"""Batches of a stream: those of arrays in the same order, for any layout of replicas, and saved at any step."""

from __future__ import annotations

import dataclasses
import itertools

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import (
    ENDLESS,
    StreamPipeline,
    Weighted,
    as_source,
    build_pipeline,
    from_arrays,
    from_dataset,
    with_class_weight,
)
from tfpar.inputs.streams.position import PASSES, STATE

import numpy as np
import pytest
import tensorflow as tf

N, BATCH = 23, 8


def arrays(count: int = N) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3), np.arange(count, dtype=np.int32) % 5


def config(**options) -> InputConfig:
    return InputConfig(global_batch_size=BATCH, uneven_batches=True, shuffle=False, **options)


def elements(pipeline, worker: int, count: int) -> list:
    return list(pipeline.dataset(worker).take(count).as_numpy_iterator())


@pytest.mark.parametrize("batched", [0, 1, 5, 8, 23])
@pytest.mark.parametrize(
    ("replicas", "workers", "micro_batches"), [(1, 1, 1), (1, 1, 3), (3, 1, 1), (4, 2, 2), (3, 3, 1)]
)
def test_elements_are_those_of_arrays(batched, replicas, workers, micro_batches):
    """Whatever the dataset's own batches; two epochs and a bit."""
    x, y = arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.batch(batched) if batched else dataset
    layout = {"replicas": replicas, "workers": workers, "accumulate_steps": micro_batches}
    stream = build_pipeline(from_dataset(dataset).counted(), config(), **layout)
    plain = build_pipeline(from_arrays(x, y), config(), **layout)
    assert isinstance(stream, StreamPipeline)
    assert stream.element_spec == plain.element_spec
    assert (stream.steps_per_epoch, stream.micro_batch, stream.pads) == (3, plain.micro_batch, plain.pads)
    assert stream.examples_per_epoch == N
    for worker in range(workers):
        count = 7 * replicas // workers
        for found, expected in zip(elements(stream, worker, count), elements(plain, worker, count), strict=True):
            assert np.array_equal(found[2], expected[2])
            real = expected[2] > 0
            assert np.array_equal(found[0][real], expected[0][real])
            assert np.array_equal(found[1][real], expected[1][real])


@pytest.mark.parametrize(("replicas", "workers"), [(1, 1), (3, 1), (4, 2)])
def test_an_evaluation_has_each_example_once(replicas, workers):
    x, y = arrays()
    source = from_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(5)).counted()
    pipeline = build_pipeline(source, config(), replicas=replicas, workers=workers, training=False)
    seen = []
    for worker in range(workers):
        rows = elements(pipeline, worker, 1000)
        assert len(rows) == pipeline.steps_per_epoch * replicas // workers
        places = pipeline.indices(0, pipeline.steps_per_epoch, worker)  # [K, A, L, m]
        for row, place in zip(rows, places.transpose(0, 2, 1, 3).reshape(-1, *places.shape[1::2]), strict=True):
            real = row[2] > 0
            assert np.array_equal(real, place >= 0)
            assert np.array_equal(row[0][real], x[place[real]])
            seen += place[real].tolist()
    assert sorted(seen) == list(range(N))


@pytest.mark.parametrize("batched", [0, 5])
def test_a_generator_is_counted_up_to_what_is_read(batched):
    x, y = arrays()
    given = []

    def endless():
        for number in itertools.count():
            given.append(number)
            yield x[number % N], y[number % N]

    signature = tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.int32)
    dataset = tf.data.Dataset.from_generator(endless, output_signature=signature)
    source = from_dataset(dataset.batch(batched) if batched else dataset).counted(read=2 * BATCH)
    assert source.examples == 2 * BATCH
    assert len(given) <= 2 * BATCH + 64
    found = elements(build_pipeline(source, config(), training=False), 0, 1000)
    assert np.array_equal(np.concatenate([row[0] for row in found]).reshape(-1, 3), x[: 2 * BATCH])
    assert from_dataset(dataset.take(9)).counted(read=2 * BATCH).examples == 9


@pytest.mark.parametrize(
    ("regroup", "examples", "reads"),
    [
        (lambda dataset: dataset, N, 0),
        (lambda dataset: dataset.batch(5, drop_remainder=True), 20, 0),
        (lambda dataset: dataset.batch(5), N, N),
        (lambda dataset: dataset.filter(lambda *_: True), N, N),
    ],
)
def test_only_examples_whose_number_is_not_known_are_counted(regroup, examples, reads):
    read = tf.Variable(0)

    def counting(x, y):
        with tf.control_dependencies([read.assign_add(1)]):
            return tf.identity(x), y

    source = from_dataset(regroup(tf.data.Dataset.from_tensor_slices(arrays()).map(counting)))
    assert source.counted().examples == examples
    assert int(read) == reads


def test_workers_with_streams_of_their_own():
    def own(context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows = np.arange(100, dtype=np.float32).reshape(-1, 1) + 1000 * context.input_pipeline_id
        # Once for the shapes alone, with the context of a single worker.
        assert (context.num_input_pipelines, context.num_replicas_in_sync) in ((2, 4), (1, 1))
        return tf.data.Dataset.from_tensor_slices((rows, rows)).batch(7).repeat()

    assert as_source(own).sharding == from_dataset(own).sharding == "worker"
    pipeline = build_pipeline(from_dataset(own), config(), replicas=4, workers=2, accumulate_steps=2)
    assert pipeline.steps_per_epoch == ENDLESS
    for worker in range(2):
        rows = elements(pipeline, worker, 6)  # three steps of two replicas
        taken = np.concatenate([row[0][row[2] > 0] for row in rows]).ravel()
        assert sorted(taken) == [1000 * worker + number for number in range(12)]  # 8 / 2 workers, 3 steps


@pytest.mark.parametrize("function", [lambda: None, lambda one, two: None, lambda: (yield 1)])
def test_other_functions_are_refused(function):
    with pytest.raises(ConfigError, match=r"A function must take one argument, a tf\.distribute\.InputContext, and"):
        as_source(function)


def test_structures_and_weights():
    x, y = arrays()
    dataset = tf.data.Dataset.from_tensor_slices(({"a": x, "b": (y, x[:, 0].astype(np.float64))}, y, x[:, 1])).batch(4)
    source = from_dataset(dataset, name="mixed")
    assert source.info.input_spec["b"][1] == tf.TensorSpec([], tf.float32)
    assert source.info.weight_spec == tf.TensorSpec([], tf.float32)
    [(inputs, targets, weight)] = elements(build_pipeline(source, config()), 0, 1)
    assert isinstance(targets, Weighted)
    assert np.array_equal(inputs["a"][0], x[:BATCH])
    assert np.array_equal(inputs["b"][1][0], x[:BATCH, 0])
    assert np.array_equal(targets.sample_weight[0], x[:BATCH, 1])
    assert weight.tolist() == [[1.0] * BATCH]
    assert from_dataset(tf.data.Dataset.from_tensor_slices(x).batch(2)).info.label_spec == ()
    assert "mixed" in build_pipeline(source, config()).report()


@pytest.mark.parametrize("local", [1, 2])
def test_a_saved_position_goes_on_exactly(local):
    """With shuffling, of which the buffer is saved, in the middle of an epoch."""
    x, y = arrays(50)

    def new() -> StreamPipeline:
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20, seed=3).batch(6).prefetch(1)
        return build_pipeline(from_dataset(dataset), config(), replicas=local)

    whole = new()
    iterator = iter(whole.dataset())
    whole.follow(iterator)
    for _ in range(9 * local):
        next(iterator)
    saved = whole.export()
    expected = [next(iterator)[0].numpy() for _ in range(8)]
    again = new()
    assert "continues where it stopped" in again.restore(saved, same_workers=True)
    iterator = iter(again.dataset())
    again.follow(iterator)
    for rows in expected:
        assert np.array_equal(next(iterator)[0].numpy(), rows)
    assert "starts again from its beginning (the saved run had other workers)" in new().restore(
        saved, same_workers=False
    )


@pytest.mark.parametrize(
    ("regroup", "own"),
    [
        (lambda dataset: dataset.batch(5).prefetch(2), 5),
        (lambda dataset: dataset.batch(5, drop_remainder=True).map(lambda x, y: (x, y)), 5),
        (lambda dataset: dataset.batch(BATCH), BATCH),
        (lambda dataset: dataset, None),
    ],
)
def test_the_report_says_where_batches_are_regrouped(regroup, own):
    source = from_dataset(regroup(tf.data.Dataset.from_tensor_slices(arrays(20))))
    assert source.own_batch == own
    report = build_pipeline(source, config()).report()
    line = f"batches of {own} in the dataset are regrouped; global_batch_size={own} keeps them"
    assert (line in report) is (own == 5)


def test_options_that_a_stream_does_not_use_are_reported_or_refused():
    source = from_dataset(tf.data.Dataset.from_tensor_slices(arrays(20)))
    used = dataclasses.replace(config(), on_bad_record="skip", input_threads=3)
    line = "--input_threads=3, --on_bad_record=skip: the stream caches, reads and leaves out examples itself"
    assert line in build_pipeline(source, used).report()
    assert "without use" not in build_pipeline(source, config()).report()
    with pytest.raises(ConfigError, match=r"--shard_by=file: .*sharding=\"worker\""):
        build_pipeline(source, dataclasses.replace(config(), shard_by="file"))


def test_weights_of_classes_count_as_data():
    source = from_dataset(tf.data.Dataset.from_tensor_slices(arrays(20)))
    weighted = [with_class_weight(source, {0: 1.0, 1: weight}) for weight in (5.0, 9.0, 5.0)]
    prints = [each.info.fingerprint for each in (source, *weighted)]
    assert prints[1] == prints[3]
    assert len(set(prints)) == 3


def shuffled(kind: str) -> tf.data.Dataset:
    """45 numbers in a new order in each pass, in batches of 6, with seeds that are the same in every process."""
    tf.random.set_seed(1)
    numbers = tf.data.Dataset.from_tensor_slices(np.arange(45, dtype=np.float32).reshape(45, 1))
    files = tf.data.Dataset.range(9).shuffle(9, seed=3)
    if kind == "files":  # of which the last is open long before the pass ends
        numbers = files.interleave(lambda file: numbers.skip(file * 5).take(5), cycle_length=3, num_parallel_calls=2)
    return (numbers.cache() if kind == "cache" else numbers).shuffle(20, seed=4).batch(6)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["examples", "files", "cache"])
def test_later_passes_keep_their_order(kind, prefetch):
    """Saved at any step: a `shuffle` that has been read to its end is not in the state that tf.data saves."""

    def read(stop: int = 0, count: int = 15) -> list[list[float]]:
        pipeline = build_pipeline(from_dataset(shuffled(kind)), config(prefetch=prefetch))
        iterator = iter(pipeline.dataset())
        pipeline.follow(iterator)
        found = []
        for step in range(count):
            if step and step == stop:
                saved = pipeline.export()
                pipeline = build_pipeline(from_dataset(shuffled(kind)), config(prefetch=prefetch))
                pipeline.restore(saved, same_workers=True)
                iterator = iter(pipeline.dataset())
                pipeline.follow(iterator)
            if step % 2:
                assert pipeline.export()
            found.append(next(iterator)[0].numpy().ravel().tolist())
        return found

    plain = shuffled(kind).rebatch(BATCH).repeat().take(15).as_numpy_iterator()
    expected = [row.ravel().tolist() for row in plain]
    whole = read()
    assert [row[: len(other)] for row, other in zip(whole, expected, strict=True)] == expected
    for stop in (3, 4, 5, 6, 11):
        assert read(stop) == whole, f"stopped at {stop}"


def test_an_evaluation_of_the_same_dataset_leaves_the_seeds_as_tf_data_saved_them():
    """The evaluation takes seeds of the same `shuffle`, so the number of passes does not say how many were taken."""
    dataset = shuffled("examples")
    pipeline = build_pipeline(from_dataset(dataset), config(prefetch=0))
    iterator = iter(pipeline.dataset())
    pipeline.follow(iterator)
    next(iterator)
    assert pipeline.export()[PASSES] == 1
    list(build_pipeline(from_dataset(dataset).counted(), config(), training=False).dataset())
    assert pipeline.export()[PASSES] == 0


def test_a_stream_that_cannot_be_saved_says_so_once(caplog):
    def rows():
        yield from np.arange(12.0).reshape(-1, 1)

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([1], tf.float32))
    pipeline = build_pipeline(from_dataset(dataset, batched=False), config())
    iterator = iter(pipeline.dataset())
    pipeline.follow(iterator)
    next(iterator)
    saved = [pipeline.export() for _ in range(2)]
    assert [state.size for each in saved for state in each.values()] == [0, 0]
    assert caplog.text.count("tf.data cannot save this stream's position") == 1
    assert "position was not saved" in pipeline.restore(saved[0], same_workers=True)


@pytest.mark.parametrize(
    ("use", "saved"),
    [
        (lambda shuffle, plain: shuffle.concatenate(plain), True),
        (lambda shuffle, plain: plain.concatenate(shuffle), False),
        (lambda shuffle, plain: plain.concatenate(shuffle.map(lambda row: row)).batch(4).unbatch(), False),
        (lambda shuffle, plain: tf.data.Dataset.zip(shuffle, shuffle).map(lambda a, b: a + b), False),
    ],
)
def test_a_position_is_not_saved_if_passes_do_not_count_the_seeds(use, saved, caplog):
    plain = tf.data.Dataset.from_tensor_slices(np.arange(12, dtype=np.float32).reshape(12, 1))
    pipeline = build_pipeline(from_dataset(use(plain.shuffle(9, seed=4), plain), batched=False), config())
    iterator = iter(pipeline.dataset())
    pipeline.follow(iterator)
    next(iterator)
    assert bool(pipeline.export()[STATE].size) is saved
    line = "cannot save this stream's position (a shuffle in a later part of concatenate(), or used in two places)"
    assert (line in caplog.text) is not saved


def test_a_position_of_another_pipeline_is_refused():
    x, y = arrays()
    pipelines = [
        build_pipeline(from_dataset(dataset), config())
        for dataset in (
            tf.data.Dataset.from_tensor_slices((x, y)).shuffle(5, seed=1).batch(4),
            tf.data.Dataset.range(40).map(lambda i: (tf.cast([i, i, i], tf.float32), tf.cast(i, tf.int32))).batch(4),
        )
    ]
    iterator = iter(pipelines[0].dataset())
    pipelines[0].follow(iterator)
    next(iterator)
    pipelines[1].restore(pipelines[0].export(), same_workers=True)
    with pytest.raises(ConfigError, match="does not fit this stream"):
        pipelines[1].follow(iter(pipelines[1].dataset()))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (lambda x, y: tf.data.Dataset.from_tensor_slices((x, y, y, y)), {}, "elements have 4 parts"),
        (lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).repeat(), {"training": False}, "has no end"),
        (lambda x, y: 3, {}, "expected a tf.data.Dataset"),
        (lambda x, y: tf.data.Dataset.from_tensor_slices(tf.RaggedTensor.from_row_lengths(y, [N])), {}, "RaggedTensor"),
        (
            lambda x, y: tf.data.Dataset.from_generator(lambda: iter(x), output_signature=tf.TensorSpec([None, None])),
            {},
            "is not known before it is read",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(dataset, options, message):
    with pytest.raises(ConfigError, match=message):
        build_pipeline(from_dataset(dataset(*arrays())).counted(), config(), **options)


def test_arguments_that_are_refused():
    dataset = tf.data.Dataset.range(3)
    with pytest.raises(ConfigError, match="sharding"):
        from_dataset(dataset, sharding="file")
    with pytest.raises(ConfigError, match="examples=0"):
        from_dataset(dataset, examples=0)
    with pytest.raises(ConfigError, match="leaves no steps"):
        build_pipeline(from_dataset(dataset.batch(2)).counted(), config(remainder="drop"))
    with pytest.raises(ConfigError, match="every worker reads a stream of its own"):
        from_dataset(lambda context: dataset).counted()
    with pytest.raises(ConfigError, match="not divisible by 3 workers"):
        build_pipeline(from_dataset(lambda context: dataset), config(), replicas=3, workers=3)

"""Objects with `__len__` and `__getitem__`: read by index, in the pipeline's order, resumed at any step."""

from __future__ import annotations

import re

from tests.inputs import helpers
from tfpar import inputs
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, Weighted

import keras
import numpy as np
import pytest
import tensorflow as tf
from array_record.python import array_record_data_source, array_record_module


class Many(helpers.MapStyle):
    """With `__getitems__`, as PyTorch's fetcher and Grain use it."""

    def __getitems__(self, indices: list[int]) -> list[tuple]:
        assert all(isinstance(index, int) for index in indices)
        return [self[index] for index in indices]


def config(batch: int, **options) -> InputConfig:
    return InputConfig(global_batch_size=batch, **{"uneven_batches": True, **options})


@pytest.mark.parametrize("kind", [helpers.MapStyle, Many])
def test_items_come_in_the_pipelines_order_and_resume_at_any_step(kind):
    source = inputs.from_random_access(kind(), name="mine")
    assert source.info.input_spec == tf.TensorSpec([3, 2], tf.float32)
    assert source.info.label_spec == tf.TensorSpec([], tf.int32)
    assert (source.info.num_examples, source.info.num_classes, source.portable) == (40, 0, False)
    pipeline = Pipeline(source, config(12), accumulate_steps=2, replicas=2, workers=2, seed=3)
    steps = 2 * pipeline.steps_per_epoch
    for start in (0, 3):
        elements = pipeline.dataset(1, start_step=start).take(steps - start).as_numpy_iterator()
        for step, (x, y, weight) in enumerate(elements, start):
            expected = pipeline.indices(step, 1)[0][:, 1]
            np.testing.assert_array_equal(x[..., 0, 0][weight > 0], expected[expected >= 0])
            np.testing.assert_array_equal(y[weight > 0], expected[expected >= 0] % 5)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_slow_items_are_read_in_parallel_by_at_most_as_many_threads(threads):
    data = helpers.MapStyle(64, seconds=0.01)
    pipeline = Pipeline(inputs.from_random_access(data, threads=threads), config(4, prefetch=0, input_threads=4))
    for _ in pipeline.dataset().take(16):
        pass
    assert min(threads, 2) <= data.most_at_once <= threads


def test_a_list_of_tuples_and_one_of_dicts():
    pairs = [(np.array([number, 0.5]), number % 3, 2.0 * number) for number in range(9)]
    source = inputs.from_random_access(pairs)
    x, y = source.fetch(tf.constant([4, 0], tf.int64))
    np.testing.assert_array_equal(x, [[4, 0.5], [0, 0.5]])
    assert isinstance(y, Weighted)
    np.testing.assert_array_equal(y.y, [1, 0])
    np.testing.assert_array_equal(y.sample_weight, [8.0, 0.0])
    rows = [{"image": np.full((2, 2), n, np.uint8), "word": f"w{n}", "n": n, "heavy": 0.5} for n in range(9)]
    source = inputs.from_random_access(rows, inputs=["image", "word"], labels="n", sample_weight="heavy", num_classes=9)
    assert source.info.input_spec == {"image": tf.TensorSpec([2, 2], tf.float32), "word": tf.TensorSpec([], tf.string)}
    x, y = source.fetch(tf.constant([8], tf.int64))
    np.testing.assert_array_equal(x["image"], np.full((1, 2, 2), 8.0))
    np.testing.assert_array_equal(x["word"], [b"w8"])
    np.testing.assert_array_equal(y.sample_weight, [0.5])
    assert source.info.num_classes == 9
    whole, nothing = inputs.from_random_access(rows).fetch(tf.constant([1], tf.int64))
    assert sorted(whole) == ["heavy", "image", "n", "word"]
    assert nothing == ()


def test_a_transform_and_scaled_images_and_a_cache():
    data = helpers.MapStyle(10)
    source = inputs.from_random_access(
        data,
        transform=lambda item: {"a": item[0][0].astype(np.uint8)[None].repeat(2, 0), "b": str(item[1])},
        scale={"a": 0.5, "b": 1.0},
        cache="memory",
    )
    for _ in range(3):
        x, _ = source.fetch(tf.constant([6, 7], tf.int64))
        np.testing.assert_array_equal(x["a"][:, 0, 0], [3.0, 3.5])
        np.testing.assert_array_equal(x["b"], [b"1", b"2"])
    assert max(data.reads[index] for index in range(1, 10)) == 1


class Tensor:
    """By the protocol of `torch.Tensor`, as far as readers use it: NumPy does not know its dtype."""

    dtype = "torch.float32"

    def __init__(self, values: np.ndarray):
        self._values = np.asarray(values)

    @property
    def shape(self) -> tuple:
        return self._values.shape

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return self._values.astype(dtype) if dtype else self._values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: object) -> Tensor:
        return Tensor(self._values[key])


class TorchDataset(helpers.MapStyle):
    """By the protocol of a map-style `torch.utils.data.Dataset`: items are tensors, `+` joins two data sets."""

    def __getitem__(self, index: int) -> tuple:
        return tuple(map(Tensor, super().__getitem__(index)))

    def __add__(self, other: object) -> None:
        raise AssertionError("nothing joins data sets")


def test_items_of_tensors_of_another_library():
    source = inputs.as_source(TorchDataset(6))
    assert source.info.input_spec == tf.TensorSpec([3, 2], tf.float32)
    x, y = helpers.fetch_all(source)
    np.testing.assert_array_equal(x[:, 0, 0], np.arange(6))
    np.testing.assert_array_equal(y, np.arange(6) % 5)


def test_a_real_tfds_data_source(tmp_path):
    builder = helpers.prepare(helpers.TinyShapes, tmp_path, "array_record")
    source = inputs.from_random_access(builder.as_data_source(split="train"), scale=1 / 255)
    assert (source.info.num_examples, source.info.num_classes) == (20, 3)
    assert source.info.input_spec == tf.TensorSpec([6, 5, 3], tf.float32)
    x, y = helpers.fetch_all(source)
    found = [(np.rint(image * 255).astype(np.uint8).tobytes(), int(label)) for image, label in zip(x, y, strict=True)]
    expected = [(helpers.TinyShapes.IMAGES[number].tobytes(), number % 3) for number in range(20)]
    assert sorted(found) == sorted(expected)


def test_a_real_array_record_file(tmp_path):
    path = str(tmp_path / "numbers.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for number in range(30):
        writer.write(np.array([number, 2 * number], np.float32).tobytes())
    writer.close()
    with array_record_data_source.ArrayRecordDataSource(path) as data:
        source = inputs.from_random_access(data, transform=lambda raw: (np.frombuffer(raw, np.float32), len(raw)))
        x, y = helpers.fetch_all(source)
        raw, _ = inputs.from_random_access(data).fetch(tf.constant([0], tf.int64))
    np.testing.assert_array_equal(x, np.stack([np.arange(30), 2 * np.arange(30)], -1))
    assert set(y) == {8}
    assert raw[0].numpy() == bytes(8), "zeros at the end are kept"


def test_a_py_dataset_gives_its_batches_whole():
    data = helpers.Batches()
    source = inputs.from_random_access(data)
    assert (source.info.num_examples, source.info.block_size) == (20, 6)
    assert source.info.input_spec == {"n": tf.TensorSpec([], tf.float32)}
    pipeline = Pipeline(source, config(6), replicas=2, seed=1)
    assert "permuted in blocks of 6 examples" in pipeline.report()
    orders = []
    data.reads.clear()
    elements = pipeline.dataset().take(3 * 4 * 2).as_numpy_iterator()
    for _ in range(3):
        first_of_step = []
        for _ in range(4):
            parts = [next(elements) for _ in range(2)]
            numbers = np.concatenate([x["n"][weight > 0] for x, _, weight in parts])
            np.testing.assert_array_equal(np.concatenate([y.y[w > 0] for _, y, w in parts]), numbers % 4)
            np.testing.assert_array_equal(np.concatenate([y.sample_weight[w > 0] for _, y, w in parts]), numbers / 2)
            assert numbers[0] % 6 == 0
            np.testing.assert_array_equal(numbers, np.arange(numbers[0], min(numbers[0] + 6, 20)))
            first_of_step.append(int(numbers[0]) // 6)
        orders.append(first_of_step)
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert all(order[-1] == 3 for order in orders), "the smaller batch stays last"
    assert len({tuple(order) for order in orders}) > 1, "batches are shuffled"


def test_every_example_of_batches_comes_once_for_any_batch_size():
    for batch, workers in ((5, 1), (8, 2), (20, 2)):
        pipeline = Pipeline(
            inputs.from_random_access(helpers.Batches()), config(batch), replicas=workers, workers=workers
        )
        seen = []
        for worker in range(workers):
            for x, _, weight in pipeline.dataset(worker).take(pipeline.steps_per_epoch).as_numpy_iterator():
                seen += x["n"][weight > 0].tolist()
        assert sorted(seen) == list(range(20))


def test_replicas_share_the_batch_that_is_read():
    data = helpers.Batches()
    pipeline = Pipeline(inputs.from_random_access(data), config(6), replicas=3)
    data.reads.clear()
    for _ in pipeline.dataset().take(4 * 3):
        pass
    assert len(data.reads) <= 4 + pipeline.steps_per_epoch * 2, "prefetched steps may be read too"
    assert data.reads.count(data.reads[0]) <= 2


class Flawed(helpers.MapStyle):
    """Some items are not what the first one promises."""

    def __getitem__(self, index: int) -> object:
        x, y = super().__getitem__(index)
        return {
            7: lambda: (x[:2], y),
            8: lambda: (x, 1.5),
            9: lambda: (x, y, 1.0),
            10: lambda: [][0],
            11: lambda: (np.full_like(x, np.nan), y),
            12: lambda: (x, 2**40),
        }.get(index, lambda: (x, y))()


FLAWS = {
    7: r"its input \(item 7\) has shape \(2, 2\), but that of the first item has \(3, 2\)",
    8: r"its label \(item 8\) is float64, but that of the first item is an integer",
    9: r"item 9 has the parts",
    10: r"item 10 raised IndexError: list index out of range",
    11: r"NaN or infinity in its input \(6 of 6 values\)",
    12: r"its label .* integers range from 1099511627776 to 1099511627776.*; map them to smaller ones, by transform=",
}


def test_the_error_names_the_item():
    source = inputs.from_random_access(Flawed(20))
    found = inputs.locate_bad_example(source, range(20), limit=20)
    assert [bad.index for bad in found] == sorted(FLAWS)
    for bad in found:
        assert re.search(FLAWS[bad.index], bad.reason), bad.reason


def test_flawed_items_are_skipped():
    source = inputs.from_random_access(Flawed(20), on_bad_record="skip")
    (element,) = Pipeline(source, config(20, shuffle=False)).dataset().take(1).as_numpy_iterator()
    assert np.flatnonzero(element[2][0] == 0).tolist() == sorted(FLAWS)


@pytest.mark.parametrize("kind", [int, np.int64, np.uint32])
def test_a_later_id_may_be_larger_than_the_first(kind):
    ids = [5, 2**32 - 1] if kind is np.uint32 else [5, 2**33]
    source = inputs.from_random_access([({"id": kind(number)}, 0) for number in ids])
    x, _ = source.fetch(tf.constant([0, 1], tf.int64))
    np.testing.assert_array_equal(x["id"], ids)


def test_an_id_that_exceeds_the_dtype_of_the_first_item_is_refused():
    source = inputs.from_random_access([(np.int32(5), 0), (np.int64(2**33), 0)])
    assert source.info.input_spec.dtype == tf.int32
    (bad,) = inputs.locate_bad_example(source, range(2))
    assert bad.reason.endswith("; give all items one dtype, e.g. int64, by transform="), bad.reason


def test_a_run_that_skips_bad_examples_skips_those_of_a_cached_source():
    cached = inputs.from_random_access(Flawed(20), cache="memory", num_classes=5)
    for source in (inputs.with_class_weight(cached, {0: 2.0}), cached):
        pipeline = Pipeline(source, config(20, shuffle=False, on_bad_record="skip"))
        (element,) = pipeline.dataset().take(1).as_numpy_iterator()
        assert np.flatnonzero(element[2][0] == 0).tolist() == sorted(FLAWS)
    with pytest.raises(ConfigError, match="train example 7 cannot be read"):
        Pipeline(cached, config(20)).dataset()


class Torn(helpers.Batches):
    """A batch in the middle has other sizes."""

    def __getitem__(self, index: int) -> tuple:
        x, y, weight = super().__getitem__(index)
        return (x, y, weight) if index != 1 else ({"n": x["n"][:4]}, y[:4], weight[:4])


def test_a_batch_of_another_size_is_named():
    found = inputs.locate_bad_example(inputs.from_random_access(Torn()), range(20), limit=20)
    assert [bad.index for bad in found] == [10, 11]
    assert "its batch, item 1, has 4 rows, but 6 are expected" in found[0].reason


@pytest.mark.parametrize("place", [1, 2])
def test_a_batch_that_is_larger_than_the_first_is_refused(place):
    batches = [(np.zeros((rows, 1)), np.zeros(rows)) for rows in ([2, 4, 2] if place == 1 else [2, 2, 4])]
    message = f"its batch, item {place}, has 4 rows, but the first item has 2; all batches have the size of the first"
    if place == 2:
        with pytest.raises(ConfigError, match=message):
            inputs.from_random_access(batches, batched=True)
        return
    found = inputs.locate_bad_example(inputs.from_random_access(batches, batched=True), range(6), limit=6)
    assert [bad.index for bad in found] == [2, 3]
    assert message in found[0].reason


def test_a_number_among_text_is_refused():
    source = inputs.from_random_access([("abc", 1), (5, 1), (None, 0)])
    found = inputs.locate_bad_example(source, range(3), limit=3)
    assert [bad.index for bad in found] == [1, 2]
    assert "5 is int, but the other values are text (str or bytes). Convert it, e.g. with str()" in found[0].reason


class Broken(helpers.MapStyle):
    def __getitem__(self, index: int) -> tuple:
        raise OSError("no such disk")


class Infinite(keras.utils.PyDataset):
    num_batches = None


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "list is empty"),
        (iter([1]), {}, "list_iterator has no length"),
        (Infinite(), {}, "Infinite is infinite"),
        (Broken(), {}, "Broken: item 0 cannot be read: OSError: no such disk"),
        ([(1, 2, 3, 4)], {}, "a tuple of 4 parts"),
        ([(object(), 1)], {}, "the inputs of the first item have dtype object"),
        ([{"a": 1}], {"inputs": "b"}, "no key 'b'; its keys are: a"),
        ([(1, 2)], {"inputs": "b"}, "an item is tuple, not a dict, so it has no key 'b'"),
        ([{"a": 1}], {"labels": "a"}, "labels='a' and sample_weight=None need inputs="),
        ([{"a": 1}], {"inputs": "a", "sample_weight": "a"}, "sample_weight='a' needs labels="),
        ([(1, 2)], {"threads": 0}, "threads=0 must be at least 1"),
        ([(1, 2)], {"cache": "disk"}, "cache='disk' is not known"),
        ([(1, 2)], {"batched": True}, r"is a single number, but an item must be a batch \[b, ...\]"),
        ([(np.zeros(3), np.zeros(2))], {"batched": True}, r"arrays of different lengths: \[2, 3\]"),
        ([(np.zeros(0), np.zeros(0))], {"batched": True}, "the first item is an empty batch"),
        ([([[1.0, 2.0], [3.0]], 0)], {}, r"a list is no array \(.*\)\. Pad or crop its parts to one length"),
    ],
)
def test_unsuitable_objects_are_refused_at_once(data, options, message):
    with pytest.raises(ConfigError, match=message):
        inputs.from_random_access(data, **options)

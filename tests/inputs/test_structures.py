"""Sources of any structure: several inputs, several labels or none, and sample weights, through the whole pipeline."""

from __future__ import annotations

import dataclasses

from tfpar import inputs
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, Weighted, memory, structures
from tfpar.inputs.source import CLASSIFICATION, Source, SourceInfo

import keras
import numpy as np
import pytest
import tensorflow as tf

COUNT = 23


def nested(count: int = COUNT) -> tuple[dict, tuple]:
    """Every value says which example it belongs to."""
    numbers = np.arange(count)
    x = {
        "image": np.broadcast_to(numbers[:, None, None].astype(np.uint8), (count, 2, 3)).copy(),
        "pair": [numbers.astype(np.float64), numbers[:, None] * np.ones((1, 4), np.int64)],
        "word": np.array([f"word {number}" for number in numbers]),
    }
    return x, (numbers % 5, {"depth": numbers / 2})


def numbers_in(x: dict, y: Weighted) -> np.ndarray:
    """The example that each slot holds, from every leaf; all must agree."""
    image, (scalar, vector), word = x["image"], x["pair"], x["word"]
    found = [
        image[..., 0, 0],
        scalar,
        vector[..., 3],
        np.vectorize(lambda text: int(text.split()[1]))(word),
        2 * y.y[1]["depth"],
        y.sample_weight - 100,
    ]
    for numbers in found[1:]:
        np.testing.assert_array_equal(numbers, found[0])
    np.testing.assert_array_equal(y.y[0], found[0] % 5)
    return found[0].astype(int)


def source_of(count: int = COUNT, **options) -> Source:
    x, y = nested(count)
    return inputs.from_arrays(x, y, sample_weight=100.0 + np.arange(count), **options)


def test_specs_have_the_structure_of_the_arrays():
    info = source_of().info
    assert info.input_spec == {
        "image": tf.TensorSpec([2, 3], tf.float32),
        "pair": (tf.TensorSpec([], tf.float32), tf.TensorSpec([4], tf.int32)),
        "word": tf.TensorSpec([], tf.string),
    }
    assert info.label_spec == (tf.TensorSpec([], tf.int32), {"depth": tf.TensorSpec([], tf.float32)})
    assert info.weight_spec == tf.TensorSpec([], tf.float32)
    assert info.target_spec == Weighted(info.label_spec, info.weight_spec)
    assert info.num_classes == 0


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_pipeline_carries_every_leaf_of_an_example_together(micro_batches, skip):
    config = InputConfig(global_batch_size=8, uneven_batches=True, on_bad_record="skip" if skip else "fail")
    pipeline = Pipeline(source_of(), config, accumulate_steps=micro_batches, replicas=2, workers=2, seed=4)
    for worker in range(2):
        dataset = pipeline.dataset(worker)
        assert dataset.element_spec == pipeline.element_spec
        for step, (x, y, weight) in enumerate(dataset.take(2 * pipeline.steps_per_epoch).as_numpy_iterator()):
            assert isinstance(y, Weighted)
            expected = pipeline.indices(step, 1)[0][:, worker]
            np.testing.assert_array_equal(weight > 0, expected >= 0)
            np.testing.assert_array_equal(numbers_in(x, y)[expected >= 0], expected[expected >= 0])
            by_number = pipeline.batch(tf.constant(step, tf.int64), tf.constant(worker, tf.int64))
            tf.nest.map_structure(np.testing.assert_array_equal, by_number, (x, y, weight))


def test_a_source_without_labels_has_an_empty_structure():
    source = inputs.from_arrays({"a": np.arange(6.0)})
    assert source.info.label_spec == ()
    pipeline = Pipeline(source, InputConfig(global_batch_size=3, shuffle=False))
    x, y, weight = next(pipeline.dataset().as_numpy_iterator())
    assert y == ()
    np.testing.assert_array_equal(x["a"], [[0, 1, 2]])
    np.testing.assert_array_equal(weight, np.ones((1, 3)))
    assert "6, a scalar float32, no labels" in pipeline.report()


def test_the_input_report_names_inputs_labels_and_weights():
    report = Pipeline(source_of(), InputConfig(global_batch_size=8)).report()
    assert "23, image 2x3 float32; pair/0 scalar float32; pair/1 4 int32; word scalar string, 2 labels" in report
    assert "(0 scalar int32; 1/depth scalar float32), with sample weights" in report


def test_a_list_of_arrays_is_several_inputs_and_one_of_numbers_a_single_one():
    several = inputs.from_arrays([np.zeros((4, 2)), np.zeros((4, 3))], np.zeros(4, int))
    assert [spec.shape.as_list() for spec in several.info.input_spec] == [[2], [3]]
    single = inputs.from_arrays([[0.0, 1.0], [2.0, 3.0]], [0, 1])
    assert single.info.input_spec == tf.TensorSpec([2], tf.float32)


@pytest.mark.parametrize("skip", [False, True])
def test_bad_values_are_found_in_every_leaf(skip):
    x, y = nested()
    x["pair"][0][4] = np.nan
    y[1]["depth"][7] = np.inf
    if not skip:
        with pytest.raises(
            ConfigError, match=r"example 4 has NaN or infinity in its input 'pair/0' \(1 of 1 values\); 1 more example"
        ):
            inputs.from_arrays(x, y)
        return
    source = inputs.from_arrays(x, y, on_bad_record="skip")
    pipeline = Pipeline(source, InputConfig(global_batch_size=23, shuffle=False))
    _, labels, weight = next(pipeline.dataset().as_numpy_iterator())
    assert np.flatnonzero(weight[0] == 0).tolist() == [4, 7]
    assert np.isfinite(labels[1]["depth"]).all()
    found = inputs.locate_bad_example(source, range(23), limit=5)
    assert [(bad.index, bad.reason.split(" (")[0]) for bad in found] == [
        (4, "has NaN or infinity in its input 'pair/0'"),
        (7, "has NaN or infinity in its label '1/depth'"),
    ]


def from_files(bad: int = -1) -> Source:
    """A source of two inputs and weighted labels as if it read files; one example may have another shape."""

    def read(indices: tf.Tensor) -> inputs.source.Batch:
        def one(index: np.ndarray) -> tuple[np.ndarray, ...]:
            if (index == bad).any():
                raise ValueError("torn")
            return index.astype(np.float32), np.array([b"%d" % i for i in index], object), index.astype(np.float32) / 2

        values, text, weights = tf.numpy_function(one, [indices], (tf.float32, tf.string, tf.float32))
        x = {"text": tf.reshape(text, [-1]), "value": tf.reshape(values, [-1])}
        return x, Weighted((tf.cast(indices % 3, tf.int32),), tf.reshape(weights, [-1]))

    info = SourceInfo(
        name="two",
        task=CLASSIFICATION,
        split="train",
        num_examples=40,
        input_spec={"text": tf.TensorSpec([], tf.string), "value": tf.TensorSpec([], tf.float32)},
        label_spec=(tf.TensorSpec([], tf.int32),),
        weight_spec=tf.TensorSpec([], tf.float32),
        num_classes=3,
        files=("one", "two"),
        records_per_file=(20, 20),
    )
    return Source(info=info, read=read, scale={"text": 1.0, "value": 10.0}, portable=False)


@pytest.mark.parametrize("kept", [False, True])
def test_a_source_of_files_is_cached_scaled_and_read_by_structure(kept):
    source = from_files()
    if kept:
        source = memory.keep_in_memory(source, 12)
        assert source.portable
    x, y = source.fetch(tf.constant([3, 39], tf.int64))
    np.testing.assert_array_equal(x["value"], [30, 390])
    np.testing.assert_array_equal(x["text"], [b"3", b"39"])
    np.testing.assert_array_equal(y.y[0], [0, 0])
    np.testing.assert_array_equal(y.sample_weight, [1.5, 19.5])


@pytest.mark.parametrize("kept", [False, True])
def test_an_unreadable_example_of_files_is_skipped_or_named(kept):
    source = dataclasses.replace(from_files(bad=17), skip=True)
    if kept:
        source = memory.keep_in_memory(source, 12)
    x, y, usable = inputs.fetch_with_mask(source, tf.range(10, 30, dtype=tf.int64))
    assert np.flatnonzero(~usable.numpy()).tolist() == [7]
    assert x["value"][7] == 100.0
    assert x["text"][7] == b"10"
    assert y.sample_weight[7] == 5.0
    (bad,) = inputs.locate_bad_example(source, range(40), limit=5)
    assert (bad.index, bad.file) == (17, "one")
    assert "torn" in bad.reason


def test_a_label_out_of_range_is_named_in_a_structure_too():
    source = from_files()
    wrong = dataclasses.replace(source, info=dataclasses.replace(source.info, num_classes=2))
    with pytest.raises(ConfigError, match="example 2 in file 'one' has label 2, but labels must be 0 to 1"):
        memory.keep_in_memory(wrong, 12).load()


def test_images_reach_a_model_with_the_numbers_of_fit():
    """Keras' `fit` casts uint8 images to floats, without scaling."""
    images = np.random.default_rng(0).integers(0, 256, (4, 5, 5, 1), np.uint8)
    source = inputs.from_arrays(images, np.zeros(4, int))
    assert source.info.input_spec == tf.TensorSpec([5, 5, 1], tf.float32)
    x, _ = source.fetch(tf.range(4, dtype=tf.int64))
    np.testing.assert_array_equal(x, images.astype(np.float32))
    assert source.kept_bytes == images.nbytes + 4 * 4
    scaled, _ = inputs.from_arrays(images, np.zeros(4, int), scale=1 / 255).fetch(tf.range(4, dtype=tf.int64))
    np.testing.assert_array_equal(scaled, images.astype(np.float32) * np.float32(1 / 255))


def test_large_integers_stay_int64_and_floats_follow_floatx():
    ids = np.array([[1], [2**40]])
    source = inputs.from_arrays(ids, np.zeros(2, int))
    assert source.info.input_spec.dtype == tf.int64
    np.testing.assert_array_equal(source.fetch(tf.range(2, dtype=tf.int64))[0], ids)
    keras.config.set_floatx("float64")
    try:
        source = inputs.from_arrays(np.array([0.1, 0.2]), np.array([0.3, 0.4]), sample_weight=np.array([1.0, 2.0]))
        assert {spec.dtype for spec in tf.nest.flatten((source.info.input_spec, source.info.target_spec))} == {
            tf.float64
        }
        np.testing.assert_array_equal(source.fetch(tf.range(2, dtype=tf.int64))[0], [0.1, 0.2])
    finally:
        keras.config.set_floatx("float32")


def test_an_ignored_class_is_no_bad_label():
    y = np.array([[0, -1], [2, 1]])
    source = inputs.from_arrays(np.zeros((2, 2)), y, ignore_class=-1)
    assert source.info.num_classes == 3
    assert source.info.label_range == (0.0, 2.0)
    with pytest.raises(ConfigError, match="example 0 has label -1"):
        inputs.from_arrays(np.zeros((2, 2)), y)
    assert inputs.from_arrays(np.zeros((2, 2)), np.array([[0, 255], [2, 1]]), ignore_class=255).info.num_classes == 3


def test_fingerprints_depend_on_every_leaf():
    x, y = nested()
    weights = np.ones(COUNT)
    first = inputs.from_arrays(x, y, sample_weight=weights).info.fingerprint
    assert inputs.from_arrays(*nested(), sample_weight=weights).info.fingerprint == first
    changed = {**x, "word": x["word"][::-1]}
    renamed = {**{key: value for key, value in x.items() if key != "word"}, "ward": x["word"]}
    others = [
        inputs.from_arrays(changed, y, sample_weight=weights),
        inputs.from_arrays(renamed, y, sample_weight=weights),
        inputs.from_arrays(x, y, sample_weight=2 * weights),
        inputs.from_arrays(x, y),
        inputs.from_arrays(x),
    ]
    assert first not in {other.info.fingerprint for other in others}


def test_leaves_have_paths():
    assert structures.named_leaves({"b": (1, {"c": 2}), "a": 3}) == [("a", 3), ("b/0", 1), ("b/1/c", 2)]
    assert structures.named_leaves(Weighted(1, 2)) == [("y", 1), ("sample_weight", 2)]
    assert structures.without_lists([{"a": [1, 2]}, Weighted([1], 2)]) == ({"a": (1, 2)}, Weighted((1,), 2))

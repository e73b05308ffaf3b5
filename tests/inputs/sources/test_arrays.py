"""Examples in arrays, sources by name, the checks before TensorFlow starts, and elements by number."""

from __future__ import annotations

import os
import pathlib
import sys

from tests import nursery
from tests.inputs.helpers import fetch_all, index_source
from tfpar import inputs
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline

import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[3]


def arrays(count: int = 10) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(count, 3, 2)).astype(np.float32), generator.integers(0, 4, count)


# from_arrays


def test_examples_come_back_in_order_and_by_index():
    x, y = arrays()
    source = inputs.from_arrays(x, y)
    assert (source.info.num_examples, source.info.split, source.info.task) == (10, "train", inputs.CLASSIFICATION)
    fetched_x, fetched_y = fetch_all(source)
    np.testing.assert_array_equal(fetched_x, x)
    np.testing.assert_array_equal(fetched_y, y)
    some_x, some_y = source.fetch(tf.constant([7, 0, 7], tf.int64))
    np.testing.assert_array_equal(some_x, x[[7, 0, 7]])
    np.testing.assert_array_equal(some_y, y[[7, 0, 7]])


@pytest.mark.parametrize(
    ("stored", "fetched"),
    [
        (np.float16, tf.float32),
        (tf.bfloat16.as_numpy_dtype, tf.float32),
        (np.float64, tf.float32),
        (np.uint8, tf.int32),
        (np.int64, tf.int32),
        (np.bool_, tf.float32),
    ],
)
def test_dtypes_become_those_of_a_model(stored, fetched):
    x = np.arange(6).reshape(3, 2).astype(stored)
    source = inputs.from_arrays(x, np.zeros(3, np.int64))
    assert source.info.input_spec == tf.TensorSpec([2], fetched)
    assert source.info.label_spec == tf.TensorSpec([], tf.int32)
    # Integers are not pixels here: they arrive as they are.
    np.testing.assert_array_equal(fetch_all(source)[0], x.astype(fetched.as_numpy_dtype))


@pytest.mark.parametrize(
    ("y", "options", "classes"),
    [
        (np.array([0, 3, 1]), {}, 4),
        (np.array([0, 3, 1]), {"num_classes": 7}, 7),
        (np.array([[0, 5], [1, 1], [2, 0]]), {}, 6),
        (np.array([0.5, 1.5, -2.0]), {}, 1),
        (np.zeros((3, 4)), {}, 4),
        (np.array([0, -3, 1]), {"num_classes": 0}, 0),
        (np.zeros((3, 4)), {"num_classes": 0}, 4),
    ],
)
def test_the_number_of_classes_follows_from_the_labels(y, options, classes):
    source = inputs.from_arrays(np.zeros((3, 2)), y, **options)
    assert source.info.num_classes == classes
    assert source.info.label_spec.shape == y.shape[1:]
    np.testing.assert_array_equal(fetch_all(source)[1], y)


def test_the_arrays_are_copied():
    x, y = arrays()
    kept_x, kept_y = x.copy(), y.astype(np.int32)
    source = inputs.from_arrays(x, kept_y)
    x[:] = 0
    kept_y[:] = 0
    fetched_x, fetched_y = fetch_all(source)
    np.testing.assert_array_equal(fetched_x, kept_x)
    np.testing.assert_array_equal(fetched_y, y)


def test_a_source_reports_its_memory():
    """The input report prints it, and a tf.data service refuses more than a graph may hold."""
    x, y = arrays()
    source = inputs.from_arrays(x, y)
    assert source.kept_bytes == 10 * (3 * 2 * 4 + 4)


def test_lists_are_accepted():
    source = inputs.from_arrays([[1.0], [2.0]], [0, 1], split="validation", name="pairs")
    assert (source.info.name, source.info.split, source.info.num_classes) == ("pairs", "validation", 2)


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.zeros((3, 2)), np.zeros(2, int), {"name": "mine"}, r"mine: 3 inputs and 2 labels"),
        (
            np.zeros((3, 2)),
            np.array([0, 1, 5]),
            {"num_classes": 5},
            r"example 2 has label 5, but labels must be 0 to 4",
        ),
        (np.zeros((2, 1)), np.array([7, 2**32 + 5]), {}, r"integer labels range from 7 to 4294967301"),
        (np.array([[7], [2**64 - 1]], np.uint64), None, {}, r"integer inputs range from 7 to 18446744073709551615"),
        (np.zeros((3, 2)), np.array([0, -1, -1]), {}, r"train example 1 has label -1, .*; 1 more example is bad too"),
        (
            np.zeros((3, 2)),
            -np.ones(3, int),
            {},
            r"label -1, but labels are class numbers, from 0 on, or floating point .*; 2 more examples are bad too",
        ),
        ([np.zeros((3, 2)), np.zeros((4, 2))], np.zeros(3), {}, r"3 inputs '0' and 4 inputs '1' and 3 labels"),
        ({"a": np.zeros(3), "b": np.zeros(3, complex)}, None, {}, "the inputs have dtype complex128"),
        (np.zeros(3, "timedelta64[s]"), None, {}, r"the inputs have dtype timedelta64\[s\], but must be"),
        ({}, None, {}, "the inputs are {}, without an array"),
        ([[1.0, 2.0], [3.0]], [0, 1], {}, r"the inputs are no array \(.*\)\. All examples need the same shape"),
        (np.zeros(3), None, {"sample_weight": np.ones(3)}, "sample_weight needs labels"),
        (np.zeros(3), np.zeros(3), {"sample_weight": np.ones(2)}, "3 inputs and 3 labels and 2 weights"),
        (np.zeros(3), np.zeros(3), {"sample_weight": np.array([1, np.nan, 1])}, "infinity in its sample weight"),
        (np.zeros(3), {"a": np.array([1, 2, np.inf])}, {}, "example 2 has NaN or infinity in its label 'a'"),
        ({"a": np.zeros(3)}, None, {"scale": {"b": 2.0}}, r"another structure than the inputs, \['a'\]"),
        (
            np.zeros((2, 2)),
            np.array([[0, 1], [1, 4]]),
            {"num_classes": 4},
            r"example 1 has label 4, but labels must be 0 to 3",
        ),
    ],
)
def test_unsuitable_arrays_are_refused(x, y, options, message):
    with pytest.raises(ConfigError, match=message):
        inputs.from_arrays(x, y, **options)


@pytest.mark.parametrize("weights", [None, np.ones(4)])
def test_labels_that_are_left_out_do_not_count(weights):
    labels = np.array([0, -1, 2, 7])
    options = {"sample_weight": weights, "on_bad_record": "skip"}
    assert inputs.from_arrays(np.zeros((4, 2)), labels, num_classes=3, **options).info.label_range == (0, 2)
    assert inputs.from_arrays(np.zeros((4, 2)), labels, **options).info.label_range == (0, 7)


def test_empty_arrays_are_refused_by_the_pipeline():
    source = inputs.from_arrays(np.zeros((0, 2)), np.zeros(0, int), num_classes=3, name="nothing")
    assert source.info.num_examples == 0
    with pytest.raises(ConfigError, match="--dataset=nothing: the train split is empty"):
        Pipeline(source, InputConfig(global_batch_size=1))


def test_arrays_train_through_the_pipeline_and_each_example_comes_once():
    x = np.arange(23, dtype=np.float32)[:, None]
    pipeline = Pipeline(inputs.from_arrays(x, np.arange(23)), InputConfig(global_batch_size=8), replicas=2, seed=1)
    seen = []
    for part, label, weight in pipeline.dataset().take(2 * pipeline.steps_per_epoch).as_numpy_iterator():
        np.testing.assert_array_equal(part[..., 0], label)
        seen += label[weight > 0].tolist()
    assert sorted(seen) == list(range(23))


def test_the_fingerprint_depends_on_number_shape_and_content():
    x, y = arrays()
    first = inputs.from_arrays(x, y, num_classes=4).info.fingerprint
    assert inputs.from_arrays(x.copy(), y, num_classes=4, name="other").info.fingerprint == first
    for other in (
        inputs.from_arrays(x[:9], y[:9], num_classes=4),
        inputs.from_arrays(x[:, :2], y, num_classes=4),
        inputs.from_arrays(x[::-1].copy(), y, num_classes=4),
        inputs.from_arrays(x, y[::-1].copy(), num_classes=4),
        inputs.from_arrays(x, y, num_classes=5),
        inputs.from_arrays(x, y, num_classes=4, split="validation"),
    ):
        assert other.info.fingerprint != first


# load, and what is checked before TensorFlow starts


def test_load_accepts_name_split_and_options():
    train = inputs.load("synthetic:4x4x1:3:50")
    held_out = inputs.load("synthetic:4x4x1:3:50", "validation", validation_fraction=0.2)
    assert (train.info.num_examples, train.info.num_classes, train.info.split) == (50, 3, "train")
    assert held_out.info.split == "validation"
    assert train.info.input_spec == held_out.info.input_spec == tf.TensorSpec([4, 4, 1], tf.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("digit",), {}, r"--dataset='digit' is not known\. Did you mean 'digits'"),
        (("digits", "test"), {}, r"split='test' must be 'train' or 'validation'"),
        (("digits",), {"global_batch_size": 0}, r"--global_batch_size=0 is out of range"),
        (("digits",), {"cache": "disk"}, r"--cache='disk' is not known"),
    ],
)
def test_load_refuses_unknown_arguments(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        inputs.load(*arguments, **options)


def test_check_kind_reads_only_the_word_before_the_colon():
    for dataset in ("digits", "text", "text:/no/such/place", "images:/no/such/place", "tfrecord:*", "synthetic:8"):
        inputs.check_kind(InputConfig(dataset=dataset))
    with pytest.raises(ConfigError, match=r"--dataset='syntetic' is not known\. Did you mean 'synthetic'"):
        inputs.check_kind(InputConfig(dataset="syntetic:8"))
    with pytest.raises(ConfigError, match="--dataset=''"):
        inputs.check_kind(InputConfig(dataset=""))


@pytest.mark.parametrize(
    ("batch", "replicas", "micro_batches", "nearest"),
    [(50, 4, 3, "48 or 60"), (3, 4, 1, "4;"), (7, 1, 2, "6 or 8"), (100, 3, 1, "99 or 102")],
)
def test_check_divides_names_the_nearest_sizes(batch, replicas, micro_batches, nearest):
    with pytest.raises(ConfigError) as caught:
        inputs.check_divides(InputConfig(global_batch_size=batch), replicas, micro_batches)
    message = str(caught.value)
    parts = replicas * micro_batches
    for part in (f"--global_batch_size={batch}", nearest, "--uneven_batches=true"):
        assert part in message
    assert f"{batch} = {batch // parts} x {parts} + {batch % parts}" in message
    inputs.check_divides(InputConfig(global_batch_size=batch, uneven_batches=True), replicas, micro_batches)
    inputs.check_divides(InputConfig(global_batch_size=batch * parts), replicas, micro_batches)


@pytest.mark.parametrize("text", ["none", "", "flip", "crop:2,flip", "shift:1, brightness:0.1"])
def test_check_augmentation_accepts_what_build_accepts(text):
    inputs.check_augmentation(text)
    inputs.build_augmentation(text)


@pytest.mark.parametrize("text", ["flop", "flip,flop", "crop", "crop:-1", "flip:1", "brightness:2", "none,flip"])
def test_check_augmentation_refuses_what_build_refuses(text):
    messages = []
    for function in (inputs.check_augmentation, inputs.build_augmentation):
        with pytest.raises(ConfigError, match="--augment=") as caught:
            function(text)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_the_checks_leave_tensorflow_uninitialised():
    """Devices can be split only before TensorFlow's first op, and the checks run before that."""
    program = """
from tfpar import inputs
from tfpar.config import InputConfig
config = InputConfig(dataset="digits", augment="crop:2,flip,cutout:2,contrast:0.1", global_batch_size=12)
inputs.check_kind(config)
inputs.check_augmentation(config.augment)
inputs.check_divides(config, 3, 2)
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
print(len(tf.config.list_logical_devices("CPU")))
"""
    result = nursery.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "3\n"


# Pipeline.batch: an element by its number


@pytest.mark.parametrize(
    ("examples", "batch", "micro_batches", "replicas", "workers", "options"),
    [
        (23, 8, 1, 1, 1, {}),
        (23, 8, 2, 2, 2, {"shuffle": False}),
        (23, 10, 3, 4, 2, {}),
        (30, 7, 1, 3, 1, {"remainder": "drop"}),
    ],
)
def test_batch_returns_the_element_of_the_dataset(examples, batch, micro_batches, replicas, workers, options):
    config = InputConfig(global_batch_size=batch, uneven_batches=True, **options)
    pipeline = Pipeline(
        index_source(examples), config, accumulate_steps=micro_batches, replicas=replicas, workers=workers, seed=5
    )
    by_number = tf.function(pipeline.batch, autograph=False)
    local = replicas // workers
    steps = 2 * pipeline.steps_per_epoch + 1
    for worker in range(workers):
        elements = pipeline.dataset(worker).take(steps * local).as_numpy_iterator()
        for step in range(steps):
            for replica in range(worker * local, (worker + 1) * local):
                expected = next(elements)
                element = by_number(tf.constant(step, tf.int64), tf.constant(replica, tf.int64))
                for one, other in zip(element, expected, strict=True):
                    assert one.dtype == other.dtype
                    assert one.shape == other.shape
                    np.testing.assert_array_equal(one, other)


def test_batch_needs_sharding_by_example():
    source = index_source(20, (10, 10))
    pipeline = Pipeline(source, InputConfig(global_batch_size=4, shard_by="file"), replicas=2, workers=2)
    with pytest.raises(ValueError, match="shard_by='example'"):
        pipeline.batch(tf.constant(0, tf.int64), tf.constant(0, tf.int64))


@pytest.mark.parametrize(
    ("count", "options", "replicas", "pads"),
    [
        (48, {}, 2, False),
        (50, {}, 2, True),
        (50, {"remainder": "drop"}, 2, False),
        (48, {"uneven_batches": True}, 5, True),
        (48, {"remainder": "drop", "uneven_batches": True}, 5, True),
        (48, {"on_bad_record": "skip"}, 2, True),
    ],
)
def test_pads_says_whether_the_pipeline_pads(count, options, replicas, pads):
    source = inputs.from_arrays(np.zeros((count, 3), np.float32), np.zeros(count, np.int32))
    config = InputConfig(dataset="arrays", global_batch_size=24, **options)
    assert inputs.Pipeline(source, config, replicas=replicas).pads == pads


def test_inputs_must_be_given():
    with pytest.raises(ConfigError, match=r"arrays: the inputs are None\. Give an array with one row per example"):
        inputs.from_arrays(None, np.zeros(3))


def test_two_classes_that_are_called_one_are_refused_with_the_right_number():
    with pytest.raises(ConfigError, match=r"label 1, but num_classes=1 allows 0 alone; labels 0 and 1 are two classes"):
        inputs.from_arrays(np.zeros((3, 2)), np.array([0, 1, 1]), num_classes=1)

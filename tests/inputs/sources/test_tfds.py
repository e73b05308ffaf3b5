"""Any prepared TFDS data set with random access, in both record formats, compared with TFDS itself."""

from __future__ import annotations

from tests.inputs import helpers
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source
from tfpar.inputs.sources import tfds as tfds_source

import numpy as np
import pytest
import tensorflow_datasets as tfds


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tfds")
    for builder in (helpers.TinyShapes, helpers.TinyPhotos, helpers.TinyRegression):
        helpers.prepare(builder, path)
    return path


@pytest.fixture
def build(data_dir):
    def made(dataset: str, split: str = "train", **options):
        return build_source(InputConfig(dataset=dataset, data_dir=str(data_dir), **options), split)

    return made


def read_by_tfds(builder, split: str) -> tuple[np.ndarray, np.ndarray]:
    if builder.info.file_format.value == "array_record":
        examples = list(builder.as_data_source(split=split))
    else:
        options = tfds.ReadConfig(interleave_cycle_length=1)
        examples = list(builder.as_dataset(split=split, read_config=options).as_numpy_iterator())
    return np.stack([e["image"] for e in examples]), np.array([e["label"] for e in examples])


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
@pytest.mark.parametrize("cache", ["auto", "none"])
def test_examples_match_tfds(tmp_path, file_format, cache):
    builder = helpers.prepare(helpers.TinyShapes, tmp_path, file_format)
    for split in ("train", "validation"):
        source = build_source(InputConfig(dataset="tfds:tiny_shapes", data_dir=str(tmp_path), cache=cache), split)
        images, labels = read_by_tfds(builder, split)
        x, y = helpers.fetch_all(source)
        assert np.array_equal(x, images.astype(np.float32) * np.float32(1 / 255))
        assert np.array_equal(y, labels)
        assert source.info.storage == ("memory" if cache == "auto" else "files")
        assert source.info.class_names == ("ash", "birch", "cedar")
        assert len(source.info.files) == 3
        assert sum(source.info.records_per_file) == len(labels)


def test_splits_use_the_notation_of_tfds(data_dir, build):
    builder = tfds.builder_from_directory(str(data_dir / "tiny_shapes" / "1.2.0"))
    for dataset, split, same_as in [
        ("tfds:tiny_shapes:train[25%:60%]", "train", "train[25%:60%]"),
        ("tfds:tiny_shapes:train[25%:60%]", "validation", "validation"),
        ("tfds:tiny_shapes:train[:12],train[12:]", "train", "train[:12]"),
        ("tfds:tiny_shapes:train[:12],train[12:]", "validation", "train[12:]"),
        ("tfds:tiny_shapes:1.2.0:validation", "train", "validation[:8]"),
        ("tfds:tiny_shapes:1.2.0:validation", "validation", "validation[8:]"),
        ("tfds:tiny_shapes:1.2.0", "train", "train"),
        ("tfds:tiny_shapes:train+validation", "train", "train+validation"),
    ]:
        images, labels = read_by_tfds(builder, same_as)
        x, y = helpers.fetch_all(build(dataset, split))
        assert np.array_equal(np.round(x * 255), images), dataset
        assert np.array_equal(y, labels), dataset


def test_without_a_validation_split_the_end_is_held_out(build):
    train, held_out = (build("tfds:tiny_photos", split, validation_fraction=0.25) for split in ("train", "validation"))
    assert (train.info.num_examples, held_out.info.num_examples) == (15, 5)
    means = [*helpers.fetch_all(train)[0][:, 0, 0, 0], *helpers.fetch_all(held_out)[0][:, 0, 0, 0]]
    assert sorted(np.round(np.array(means) * 255)) == [10.0 * number for number in range(20)]


def test_images_of_different_sizes_are_resized(build):
    source = build("tfds:tiny_photos", image_size=4)
    x, _ = helpers.fetch_all(source)
    assert x.shape == (18, 4, 4, 3)
    assert np.array_equal(x, np.broadcast_to(x[:, :1, :1, :1], x.shape))


def test_the_pipeline_reads_an_uncached_data_set(build):
    options = InputConfig(dataset="tfds:tiny_shapes", global_batch_size=4, shard_by="file", cache="none")
    source = build("tfds:tiny_shapes", cache="none")
    expected, _ = helpers.fetch_all(source)
    pipeline = Pipeline(source, options, replicas=2, workers=2, seed=1)
    seen = []
    for worker in range(2):
        for x, _, weight in pipeline.dataset(worker).take(pipeline.steps_per_epoch).as_numpy_iterator():
            seen += [image.tobytes() for image in x[weight > 0]]
    assert sorted(seen) == sorted(image.tobytes() for image in expected)


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_text_becomes_byte_windows(tmp_path, file_format):
    helpers.prepare(helpers.TinyTexts, tmp_path, file_format)
    source = build_source(InputConfig(dataset="tfds:tiny_texts", data_dir=str(tmp_path), sequence_length=10), "train")
    x, y = helpers.fetch_all(source)
    assert source.info.task == "language_model"
    text = source.info.decode(x)
    assert all(f"text number {number}, " in text for number in range(20))
    assert np.array_equal(x.ravel()[1:], y.ravel()[:-1])


def test_text_that_does_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
    builder = helpers.prepare(helpers.TinyTexts, tmp_path)
    monkeypatch.setattr(tfds_source, "_TEXT_BYTES", 0.6 * builder.info.splits["train"].num_bytes)
    options = {"data_dir": str(tmp_path), "sequence_length": 10}
    for part in ("train", "train[:90%]", "train+validation[50%:]"):
        with pytest.raises(ConfigError, match=r"kept in memory.* --dataset='tfds:NAME:train\[:5%\],train\[5%:6%\]'"):
            build_source(InputConfig(dataset=f"tfds:tiny_texts:{part}", **options), "train")
    build_source(InputConfig(dataset="tfds:tiny_texts:train[:50%]", **options), "train")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            "tfds:tiny_shape",
            r"not prepared in --data_dir=.*Did you mean tfds:tiny_shapes.*tfds build tiny_shape --data_dir",
        ),
        ("tfds:tiny_shapes:2.0.0", "not prepared"),
        ("tfds:tiny_shapes:nothing", r"split 'nothing' does not exist. The splits are: train, validation"),
        ("tfds:tiny_shapes:train,train,train", "names 3 splits"),
        ("tfds:tiny_photos:train[:50%]", "has no validation split"),
        ("tfds:tiny_regression", r"label feature 'target' is Scalar, not ClassLabel"),
        ("tfds:", "is not tfds:NAME"),
    ],
)
def test_unsuitable_data_sets_are_refused(build, dataset, message):
    with pytest.raises(ConfigError, match=message):
        build(dataset)

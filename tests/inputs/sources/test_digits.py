"""The digits: a real TFDS data set, which the first process writes once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests import nursery
from tests.inputs.helpers import fetch_all
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source
from tfpar.inputs.sources import digits

import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn import datasets


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tfds")
    digits.prepare(str(path))
    return str(path)


@pytest.fixture
def config(data_dir):
    return InputConfig(dataset="digits", data_dir=data_dir)


def test_splits_hold_every_digit_of_scikit_learn_once(config):
    original = datasets.load_digits()
    sources = [build_source(config, split) for split in ("train", "validation")]
    assert [source.info.num_examples for source in sources] == [1437, 360]
    (train_x, train_y), (test_x, test_y) = map(fetch_all, sources)
    assert train_x.dtype == np.float32
    assert train_y.dtype == np.int32
    assert train_x.min() == 0.0
    assert train_x.max() == 1.0

    def rows(images, labels):
        return sorted(
            [*image.ravel().astype(int).tolist(), int(label)] for image, label in zip(images, labels, strict=True)
        )

    # Grey level g is stored as round(g * 255 / 16): no information is lost.
    levels = np.round(np.concatenate([train_x, test_x]) * 16)
    assert rows(levels, np.concatenate([train_y, test_y])) == rows(original.images, original.target)
    shares = np.bincount(test_y) / (np.bincount(train_y) + np.bincount(test_y))
    assert np.abs(shares - 0.2).max() < 0.006


def test_tfds_reads_the_data_set(data_dir, config):
    builder = tfds.builder_from_directory(os.path.join(data_dir, "sklearn_digits", "1.0.0"))
    assert builder.info.splits["train"].num_examples == 1437
    assert builder.info.splits["train"].num_shards == digits.SHARDS
    options = tfds.ReadConfig(interleave_cycle_length=1)
    examples = list(builder.as_dataset(split="test", read_config=options).as_numpy_iterator())
    x, y = fetch_all(build_source(config, "validation"))
    assert np.array_equal(np.round(x * 255), np.stack([example["image"] for example in examples]))
    assert y.tolist() == [example["label"] for example in examples]


def test_cached_and_uncached_examples_are_the_same(data_dir, config):
    kept = build_source(config, "validation")
    read = build_source(InputConfig(dataset="digits", data_dir=data_dir, cache="none"), "validation")
    assert (kept.info.storage, read.info.storage) == ("memory", "files")
    for left, right in zip(fetch_all(kept), fetch_all(read), strict=True):
        assert np.array_equal(left, right)


def test_files_can_be_distributed_over_workers(data_dir):
    options = InputConfig(dataset="digits", data_dir=data_dir, shard_by="file", global_batch_size=64)
    pipeline = Pipeline(build_source(options, "train"), options, replicas=4, workers=4)
    assert "worker 3: 3" in pipeline.report()
    assert pipeline.examples_per_epoch == 1437


def test_the_second_writer_uses_the_data_set_of_the_first(tmp_path, monkeypatch):
    """The other worker's data set appears after this worker has checked for it, and before it renames its own."""
    rename = os.rename

    def overtaken(source, target):
        if str(target).endswith("1.0.0") and not os.path.isdir(target) and "incomplete" not in str(source):
            shutil.copytree(source, target)
            (tmp_path / "sklearn_digits" / "1.0.0" / "theirs").touch()
        return rename(source, target)

    monkeypatch.setattr(digits.os, "rename", overtaken)
    final = digits.prepare(str(tmp_path))
    assert os.path.exists(os.path.join(final, "theirs"))
    assert os.listdir(tmp_path) == ["sklearn_digits"]


@pytest.mark.slow
def test_processes_that_start_together_read_the_same_data_set(tmp_path):
    code = (
        "import sys; from tfpar.inputs.sources import digits; import tensorflow_datasets as tfds; "
        "print(tfds.builder_from_directory(digits.prepare(sys.argv[1])).info.splits['train'].num_examples)"
    )
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    running = [
        nursery.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    # What takes long announces itself before the result.
    assert [process.communicate(timeout=300)[0].splitlines()[-1] for process in running] == ["1437", "1437"]
    assert os.listdir(tmp_path) == ["sklearn_digits"]


def test_an_argument_and_an_unwritable_directory_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="digits takes no argument"):
        build_source(InputConfig(dataset="digits:8"), "train")
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(ConfigError, match=r"cannot write its data set to --data_dir=.*TFDS_DATA_DIR"):
        build_source(InputConfig(dataset="digits", data_dir=str(occupied)), "train")

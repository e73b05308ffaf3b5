"""Damaged files of every kind of source: bad examples are located and named, or skipped at weight 0."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Callable

from tests.inputs import helpers
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import (
    READ_ERRORS,
    BadRecordError,
    Pipeline,
    Source,
    build_source,
    from_arrays,
    locate_bad_example,
    records,
    write,
)
from tfpar.inputs.sources import tfrecord

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

BATCH = 8


def config(dataset: str, **options) -> InputConfig:
    return InputConfig(dataset=dataset, **{"global_batch_size": BATCH, "image_size": 6, "prefetch": 0, **options})


def epoch(source: Source, options: InputConfig, workers: int = 1) -> dict[int, tuple[np.ndarray, np.ndarray, float]]:
    """Returns x, y and weight of every example of an epoch by index, read by workers of one replica each."""
    pipeline = Pipeline(source, options, replicas=workers, workers=workers)
    rows_by_index = {}
    for worker in range(workers):
        indices = pipeline.indices(0, pipeline.steps_per_epoch, worker).reshape(-1)
        elements = pipeline.dataset(worker).take(pipeline.steps_per_epoch).as_numpy_iterator()
        columns = [np.concatenate([np.concatenate(part) for part in column]) for column in zip(*elements, strict=True)]
        rows = zip(*columns, strict=True)
        rows_by_index |= {index: row for index, row in zip(indices.tolist(), rows, strict=True) if index >= 0}
        sums = pipeline.examples_in(np.arange(pipeline.steps_per_epoch))[:, worker].sum()
        assert sums == np.sum(indices >= 0)
    assert sorted(rows_by_index) == list(range(source.info.num_examples))
    return rows_by_index


def assert_skips(source: Source, options: InputConfig, clean: dict, bad: set[int]) -> None:
    """Checks that good examples are unchanged, and that bad ones have weight 0 and finite, valid values."""
    rows = epoch(source, options)
    assert {index for index, (_, _, weight) in rows.items() if weight == 0} == bad
    for index, (x, y, weight) in rows.items():
        assert np.isfinite(x).all()
        assert 0 <= y < source.info.num_classes
        if index not in bad:
            assert weight == 1
            np.testing.assert_array_equal(x, clean[index][0])
            np.testing.assert_array_equal(y, clean[index][1])


def assert_named(source: Source, reasons: dict[int, str]) -> None:
    """Checks that any batch with a bad example fails, and that the bad examples are located with these reasons."""
    fetch = tf.function(source.fetch, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    good = min(set(range(source.info.num_examples)) - set(reasons))
    fetch(tf.constant([good], tf.int64))
    for index in reasons:
        with pytest.raises(READ_ERRORS):
            fetch(tf.constant([good, index], tf.int64))
    bad_examples = locate_bad_example(source, range(source.info.num_examples), limit=99)
    assert [bad.index for bad in bad_examples] == sorted(reasons)
    for bad in bad_examples:
        assert re.search(reasons[bad.index], bad.describe(source.info)), bad
        assert bad.describe(source.info).isprintable()
    assert locate_bad_example(source, sorted(reasons, reverse=True), limit=1)[0] == bad_examples[-1]


def assert_refused(source: Source, reasons: dict[int, str]) -> None:
    """Checks that loading examples into memory fails, and that the error names one of the bad ones."""
    with pytest.raises(BadRecordError) as caught:
        source.load()
    assert any(re.search(reason, str(caught.value)) for reason in reasons.values())
    assert str(caught.value).endswith("or train without them: --on_bad_record=skip.")
    assert str(caught.value).isprintable()


# TFRecords


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """40 training examples in 4 shards: their directory and their values."""
    path = tmp_path_factory.mktemp("shards") / "set"
    write.write(InputConfig(dataset="synthetic:3x3x1:5:40"), str(path), shards=4, seed=3)
    options = config(f"tfrecord:{path}")
    return path, epoch(build_source(options, "train"), options)


@pytest.fixture
def damaged(shards, tmp_path):
    for path in shards[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


FILE = "train-00001-of-00004.tfrecord"
X = np.ones([3, 3, 1])


def without_label(record: bytes) -> bytes:
    parsed = tf.train.Example.FromString(record)
    del parsed.features.feature["y"]
    return parsed.SerializeToString()


def other(x: np.ndarray, y: int) -> Callable[[bytes], bytes]:
    return lambda record: tfrecord.serialise(x.astype(np.float32), np.asarray(y, np.int32))


# By number of the record in FILE: the damage, and the reason that the error gives.
DAMAGES: dict[int, tuple[Callable[[bytes], bytes], str]] = {
    1: (lambda record: b"\xff" * 30, r"cannot be read: .*[Pp]arse"),
    2: (without_label, r"cannot be read: .*Feature: y .* required"),
    3: (other(np.ones([3, 4, 1]), 1), r"cannot be read: .*x, float32 \[3, 3, 1\], takes 36 bytes"),
    4: (other(X, 5), r"has label 5, but labels must be 0 to 4"),
    5: (other(X, -1), r"has label -1, but labels must be 0 to 4"),
    6: (other(X * np.nan, 1), r"has NaN or infinity in its input \(9 of 9 values\)"),
    7: (
        other(np.where(X.cumsum().reshape(X.shape) == 2, np.inf, 1), 1),
        r"has NaN or infinity in its input \(1 of 9 values\)",
    ),
}
FLIPPED = 8


def flip(path: pathlib.Path, number: int) -> None:
    """Flips a bit in the data of a record."""
    offsets, lengths = records.scan_tfrecord(str(path))
    content = bytearray(path.read_bytes())
    content[offsets[number] + lengths[number] // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_damaged_tfrecords_are_named_or_skipped(cache, shards, damaged):
    path = damaged / FILE
    intact = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    with tf.io.TFRecordWriter(str(path)) as writer:  # with correct checksums
        for number, record in enumerate(intact):
            writer.write(DAMAGES[number][0](record) if number in DAMAGES else record)
    flip(path, FLIPPED)
    reasons = {
        10 + number: rf"train example 1{number} in file '.*{FILE}' {reason}" for number, (_, reason) in DAMAGES.items()
    }
    reasons[10 + FLIPPED] = "cannot be read: its record does not match its checksum"
    options = config(f"tfrecord:{damaged}", cache=cache)
    source = build_source(options, "train")
    (assert_refused if cache == "memory" else assert_named)(source, reasons)
    options = config(f"tfrecord:{damaged}", cache=cache, on_bad_record="skip")
    source = build_source(options, "train")
    assert_skips(source, options, shards[1], set(reasons))
    assert len(locate_bad_example(source, range(40), limit=99)) == len(
        reasons
    )  # reads the files of examples in memory again


def test_the_error_names_the_file_the_reason_and_the_remedy(damaged):
    flip(damaged / FILE, 4)
    options = config(f"tfrecord:{damaged}", cache="memory")
    with pytest.raises(BadRecordError) as caught:
        epoch(build_source(options, "train"), options)
    assert str(caught.value) == (
        f"--dataset=tfrecord:{damaged}: train example 14 in file '{damaged}/{FILE}' cannot be read: its record "
        "does not match its checksum (CRC-32C). Repair or remove such examples, or train without them: "
        "--on_bad_record=skip."
    )


@pytest.mark.parametrize("open_files", [0, 256])
def test_a_file_that_is_truncated_or_deleted_during_reading(open_files, shards, damaged, monkeypatch):
    monkeypatch.setattr(records, "_MAX_OPEN_FILES", open_files)
    options = config(f"tfrecord:{damaged}", cache="none", on_bad_record="skip")
    source = build_source(options, "train")
    content = (damaged / FILE).read_bytes()
    assert_skips(source, options, shards[1], set())
    (damaged / FILE).write_bytes(content[: len(content) - 100])
    (bad,) = locate_bad_example(source, range(40))
    assert "is torn: the file ends inside it" in bad.reason
    assert_skips(source, options, shards[1], set(range(bad.index, 20)))
    (damaged / FILE).unlink()
    if not open_files:  # an open file remains readable
        assert "No such file" in locate_bad_example(source, range(40))[0].reason
        assert_skips(source, options, shards[1], set(range(10, 20)))


def test_a_batch_of_bad_examples_alone_becomes_zeros(shards, damaged):
    for path in damaged.glob("train-*"):
        content = bytearray(path.read_bytes())
        for offset in records.scan_tfrecord(str(path))[0]:
            content[offset + 20] ^= 1
        path.write_bytes(content)
    for cache in ("memory", "none"):
        options = config(f"tfrecord:{damaged}", cache=cache, on_bad_record="skip")
        rows = epoch(build_source(options, "train"), options)
        assert not any(weight or x.any() or y for x, y, weight in rows.values())


def test_empty_shards_are_accepted(shards, damaged):
    (damaged / "train-00004-of-00005.tfrecord").touch()
    (damaged / "train-00000-of-00000.tfrecord").touch()
    for shard_by in ("example", "file"):
        options = config(f"tfrecord:{damaged}", cache="none", shard_by=shard_by, shuffle=False)
        source = build_source(options, "train")
        assert source.info.records_per_file == (0, 10, 10, 10, 10, 0)
        assert sum(weight for *_, weight in epoch(source, options).values()) == 40


def test_empty_shards_alone_are_refused(damaged):
    for path in damaged.glob("*.tfrecord"):
        path.write_bytes(b"")
    (damaged / "features.json").write_text(
        re.sub(r'("\w+-.*"): \d+', r"\1: 0", (damaged / "features.json").read_text())
    )
    options = config(f"tfrecord:{damaged}")
    with pytest.raises(ConfigError, match="the train split is empty"):
        Pipeline(build_source(options, "train"), options)


@pytest.mark.parametrize("key", ["stored_input_dtype", "stored_label_dtype"])
def test_wrong_dtypes_are_refused_before_anything_is_read(key, damaged):
    sidecar = damaged / "features.json"
    correct = sidecar.read_text()
    for dtype, reason in (
        ("string", "its dtype 'string' is not numeric"),
        ("float99", "float99"),
        ("float64", r"takes (72|8) bytes, but the records have (36|4): another dtype or shape"),
    ):
        sidecar.write_text(re.sub(rf'"{key}": "\w+"', f'"{key}": "{dtype}"', correct))
        with pytest.raises(ConfigError, match=reason):
            build_source(config(f"tfrecord:{damaged}"), "train")


def test_writing_shards_names_bad_examples_or_skips_them(shards, damaged, tmp_path_factory):
    flip(damaged / FILE, 4)
    folder = tmp_path_factory.mktemp("again")
    with pytest.raises(BadRecordError, match=r"train example 14 in file .* checksum"):
        write.write(config(f"tfrecord:{damaged}", cache="none"), str(folder / "a"), shards=2)
    assert not list(folder.iterdir())
    lines: list[str] = []
    skipping = config(f"tfrecord:{damaged}", cache="none", on_bad_record="skip")
    counts = write.write(skipping, str(folder / "a"), shards=2, progress=lines.append)
    assert list(counts.values()) == [19, 20, 2, 2]
    assert "train: 1 of 40 examples are bad and were skipped" in lines
    options = config(f"tfrecord:{folder}/a")
    rows = epoch(build_source(options, "train"), options)
    for index in range(39):
        np.testing.assert_array_equal(rows[index][0], shards[1][index + (index >= 14)][0])


# Images in folders


@pytest.fixture
def photos(tmp_path):
    """12 photographs of each of two classes for training, and 2 for validation."""
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 2)):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (9, 8, 3), np.uint8)
                suffix = "jpg" if number % 2 else "png"
                Image.fromarray(pixels).save(tmp_path / part / label / f"{number:02}.{suffix}")
    return tmp_path


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


IMAGE_DAMAGES: dict[int, tuple[Callable[[pathlib.Path], object], str]] = {
    1: (cut, "cannot be read"),
    2: (lambda path: path.write_bytes(b""), "cannot be read"),
    3: (lambda path: path.write_text("<html>404</html>" * 9), "cannot be read: .*Unknown image file format"),
    4: (lambda path: path.unlink(), "cannot be read: .*No such file"),
}


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_damaged_images_are_named_or_skipped(cache, photos):
    options = config(f"images:{photos}", cache=cache)
    clean = epoch(build_source(options, "train"), options)
    failing = build_source(options, "train")
    skipping = build_source(config(f"images:{photos}", cache=cache, on_bad_record="skip"), "train")
    reasons = {}
    for number, (spoil, reason) in IMAGE_DAMAGES.items():
        name = f"{number:02}.{'jpg' if number % 2 else 'png'}"
        spoil(photos / "train" / "cat" / name)
        reasons[number] = rf"train example in file '.*cat/{name}' {reason}"
    (assert_refused if cache == "memory" else assert_named)(failing, reasons)
    assert_skips(skipping, options, clean, set(reasons))


def test_images_of_other_modes_and_sizes_are_not_bad(photos):
    for name, mode, size in (("00.png", "L", (30, 20)), ("02.png", "RGBA", (5, 9)), ("04.png", "P", (6, 6))):
        Image.new(mode, size, 7).save(photos / "train" / "dog" / name)
    options = config(f"images:{photos}", cache="none", on_bad_record="skip")
    assert all(weight == 1 for *_, weight in epoch(build_source(options, "train"), options).values())


# TFDS


class TinyDamaged(helpers.TinyShapes):
    """Images of a declared size; one is truncated and one has another size."""

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"image": tfds.features.Image(shape=(6, 5, 3)), "label": tfds.features.ClassLabel(num_classes=3)}
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
        )


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    helpers.prepare(helpers.TinyShapes, folder, request.param)
    return folder, request.param


def spoil_tfds(folder: pathlib.Path, file_format: str) -> None:
    """Damages the first shard: truncates the image of record 1, resizes that of 2, and changes the class of 3."""
    (path,) = folder.rglob(f"*train.{file_format}-00000*")
    if file_format == "tfrecord":
        intact = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    else:
        from array_record.python import array_record_module

        reader = array_record_module.ArrayRecordReader(str(path))
        intact = reader.read_all()
    changed = []
    for number, record in enumerate(intact):
        parsed = tf.train.Example.FromString(record)
        image = parsed.features.feature["image"].bytes_list.value
        if number == 1:
            image[0] = image[0][:50]
        if number == 2:
            image[0] = tf.io.encode_png(np.zeros([6, 7, 3], np.uint8)).numpy()
        if number == 3:
            parsed.features.feature["label"].int64_list.value[0] = 17
        changed.append(parsed.SerializeToString())
    if file_format == "tfrecord":
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in changed:
                writer.write(record)
        return
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in changed:
        writer.write(record)
    writer.close()


def test_damaged_tfds_records_are_named_or_skipped(tiny, tmp_path):
    folder, file_format = tiny
    shutil.copytree(folder, tmp_path / "copy")
    names = {"dataset": "tfds:tiny_shapes", "data_dir": str(tmp_path / "copy")}
    options = config(**names)
    clean = epoch(build_source(options, "train"), options)
    spoil_tfds(tmp_path / "copy", file_format)
    for cache in ("memory", "none"):
        source = build_source(config(**names, cache=cache), "train")
        bad_examples = locate_bad_example(source, range(20), limit=9)
        assert [bad.index for bad in bad_examples] == [1, 2, 3]
        assert "cannot be read" in bad_examples[0].reason
        assert re.search(r"shape|size", bad_examples[1].reason)
        assert "has label 17, but labels must be 0 to 2" in bad_examples[2].reason
        with pytest.raises(BadRecordError if cache == "memory" else READ_ERRORS):
            epoch(source, options)
        skipping = config(**names, cache=cache, on_bad_record="skip")
        assert_skips(build_source(skipping, "train"), skipping, clean, {1, 2, 3})


# Arrays


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(60, dtype=np.float64).reshape(20, 3), np.arange(20) % 4


def test_bad_values_in_arrays_are_named_or_skipped():
    x, y = arrays()
    options = config("arrays")
    clean = epoch(from_arrays(x, y, num_classes=4), options)
    x[3, 1], x[7, 0], y[11] = np.nan, 1e300, 4
    with pytest.raises(BadRecordError, match=r"example 3 has NaN .* \(1 of 3 values\); 2 more examples are bad too"):
        from_arrays(x, y, num_classes=4)
    skipping = from_arrays(x, y, num_classes=4, on_bad_record="skip")
    assert_skips(skipping, options, clean, {3, 7, 11})
    reasons = [bad.reason for bad in locate_bad_example(skipping, range(20), limit=5)]
    assert reasons[2] == "has label 4, but labels must be 0 to 3"
    targets = np.where(y == 2, np.inf, 1.0)
    with pytest.raises(BadRecordError, match="infinity in its label"):
        from_arrays(arrays()[0], targets)


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (np.array([{}, None]), np.array([0, 1]), "the inputs have dtype object"),
        (np.ones([2, 3], complex), np.array([0, 1]), "the inputs have dtype complex128"),
        (np.ones([2, 3]), np.array(["cat", "dog"]), "the labels have dtype <U3"),
        (np.array([[1], [1, 2]], object), np.array([0, 1]), "the inputs have dtype object"),
    ],
)
def test_arrays_that_are_not_numeric_are_refused(x, y, reason):
    with pytest.raises(ConfigError, match=reason):
        from_arrays(x, y)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match=r"on_bad_record='drop' is not known.*fail, skip"):
        from_arrays(*arrays(), on_bad_record="drop")

"""Shards of any source, written and read with random access; damaged files are refused before the run."""

from __future__ import annotations

import json
import os
import pathlib
import sys

from tests import nursery
from tests.inputs.helpers import fetch_all
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source, records, write

import numpy as np
import pytest
import tensorflow as tf
from absl import flags


def read(path, split="train", **options):
    return build_source(InputConfig(dataset=f"tfrecord:{path}", **options), split)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """400 training and 40 validation images in 5 shards each."""
    path = tmp_path_factory.mktemp("shards") / "set"
    write.write(InputConfig(dataset="synthetic:4x5x2:6:400"), str(path), shards=5, seed=3)
    return path


@pytest.fixture
def copy(shards, tmp_path):
    """A copy that a test may damage."""
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("cache", ["auto", "none"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_examples_survive_a_round_trip(shards, split, cache):
    original = build_source(InputConfig(dataset="synthetic:4x5x2:6:400"), split, seed=3)
    copied = read(shards, split, cache=cache)
    for left, right in zip(fetch_all(original), fetch_all(copied), strict=True):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    assert copied.info.num_classes == 6
    assert copied.info.records_per_file == ((80,) * 5 if split == "train" else (8,) * 5)


def test_pixels_and_text_stay_compact_and_decodable(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 40)
    (tmp_path / "b.txt").write_text("ABCDEFGH" * 40)
    options = InputConfig(dataset=f"text:{tmp_path}/*.txt", sequence_length=32)
    counts = write.write(options, str(tmp_path / "out"), shards=3)
    assert sum(counts.values()) == sum(
        build_source(options, split).info.num_examples for split in ("train", "validation")
    )
    copied = read(tmp_path / "out")
    x, y = fetch_all(copied)
    assert x.dtype == y.dtype == np.int32
    assert np.array_equal(x, fetch_all(build_source(options, "train"))[0])
    assert copied.info.decode(x[0]) in ("abcdefgh" * 40 + "ABCDEFGH" * 40) * 2
    # Two arrays of 32 bytes and about 30 bytes of framing per example.
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.tfrecord")]
    assert sum(sizes) < sum(counts.values()) * 120


def test_patterns_without_split_names_hold_out_the_end(copy):
    for path in list(copy.glob("*.tfrecord")):
        if path.name.startswith("validation"):
            path.unlink()
        else:
            path.rename(copy / f"part-{path.name}")
    train, held_out = (read(f"{copy}/part*", split, validation_fraction=0.25) for split in ("train", "validation"))
    assert (train.info.records_per_file, held_out.info.records_per_file) == ((80, 80, 80, 60), (20, 80))
    whole = build_source(InputConfig(dataset="synthetic:4x5x2:6:400"), "train", seed=3)
    joined = np.concatenate([fetch_all(train)[0], fetch_all(held_out)[0]])
    assert np.array_equal(joined, fetch_all(whole)[0])


def test_files_of_no_split_are_named(copy, caplog):
    (copy / "train-00004-of-00005.tfrecord").rename(copy / "more.tfrecord")
    for split, count in (("train", 320), ("validation", 40)):
        assert read(copy, split).info.num_examples == count
    (message,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "start neither with train nor with validation, as those of other files do: more.tfrecord. Rename" in message


def test_a_pattern_of_the_training_files_takes_the_validation_files_beside_them(shards):
    alone = f"{shards}/train*"
    assert read(alone, validation_fraction=0.25).info.num_examples == 400
    assert read(alone, "validation").info.files == read(shards, "validation").info.files


def test_part_of_the_training_files_is_held_out_if_there_are_no_others(copy):
    alone = f"{copy}/train*"
    for path in copy.glob("validation*"):
        path.unlink()
    for pattern in (alone, copy):
        sizes = [read(pattern, split, validation_fraction=0.25).info.num_examples for split in ("train", "validation")]
        assert sizes == [300, 100]
    assert read(copy, validation_fraction=0.0).info.num_examples == 400


def test_a_path_may_have_brackets(copy):
    folder = copy / "run [1]*"
    folder.mkdir()
    for path in list(copy.glob("*.*")):
        path.rename(folder / path.name)
    assert read(folder).info.num_examples == 400
    (folder / "train-00000-of-00005.tfrecord").rename(folder / "train[a].tfrecord")
    assert read(f"{folder}/train[a].tfrecord").info.num_examples == 80


def test_uncached_file_shards_read_each_example_once(shards):
    options = InputConfig(dataset=f"tfrecord:{shards}", global_batch_size=30, shard_by="file", cache="none")
    pipeline = Pipeline(build_source(options, "train"), options, replicas=3, workers=3)
    seen = []
    for worker in range(3):
        for x, _, weight in pipeline.dataset(worker).take(pipeline.steps_per_epoch).as_numpy_iterator():
            seen += [row.tobytes() for row in x[weight > 0]]
    assert sorted(seen) == sorted(row.tobytes() for row in fetch_all(read(shards))[0])


def test_the_command_line_writes_shards(tmp_path):
    (tmp_path / "book.txt").write_text("some words, " * 200)
    output = tmp_path / "made" / "shards"
    command = [sys.executable, "-m", "tfpar.inputs.write", f"--dataset=text:{tmp_path}/book.txt", f"--output={output}"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = nursery.run(
        [*command, "--shards=2", "--sequence_length=20"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "train: 108 of 108 examples" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"--dataset=tfrecord:{output}")
    assert read(output).info.num_examples == 108
    assert [path.name for path in output.parent.iterdir()] == ["shards"]


def test_the_command_line_exits_with_an_error_line(tmp_path, capsys):
    for arguments, message in [
        ([f"--output={tmp_path}"], f"error: --output='{tmp_path}' exists"),
        (["--output=new", "--dataset=digts"], "error: --dataset='digts' is not known. Did you mean 'digits'"),
        (["--output=new", "shards=3"], "error: 'shards=3' is not a flag"),
        ([], "error: --output is missing: name the directory"),
        (["--output=/proc/new"], "error: --output=/proc/new: /proc cannot be written to"),
    ]:
        values = flags.FlagValues()
        write._define_flags(values)
        with pytest.raises(SystemExit) as end:
            write._main(values(["write", *arguments]), values)
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_an_empty_source_is_refused(tmp_path):
    (tmp_path / "book.txt").write_text("short")
    with pytest.raises(ConfigError, match=r"has no examples to write.*--sequence_length"):
        write.write(InputConfig(dataset=f"text:{tmp_path}/book.txt"), str(tmp_path / "out"), shards=1)
    assert not (tmp_path / "out").exists()


def test_wrong_flags_on_the_command_line_print_one_line():
    for flag in ("--shards=few", "--shard=3"):
        command = [sys.executable, "-m", "tfpar.inputs.write", "--output=new", flag]
        done = nursery.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 2
        assert flag.split("=")[0].strip("-") in done.stderr
        assert "Traceback" not in done.stderr


def test_a_failed_write_leaves_no_files(tmp_path):
    def interrupted(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write(InputConfig(dataset="synthetic:3:2:50"), str(tmp_path / "out"), shards=2, progress=interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    def full(*arguments: object) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "/mnt/.x/train-00000.tfrecord; No space left on device")

    monkeypatch.setattr(tf.io.TFRecordWriter, "write", full)
    values = flags.FlagValues()
    write._define_flags(values)
    with pytest.raises(SystemExit) as end:
        write._main(values(["write", f"--output={tmp_path}/out", "--dataset=synthetic:3:2:50"]), values)
    assert end.value.code == 1
    assert f"error: --output={tmp_path}/out could not be written (No space left on device)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_write_refuses_bad_arguments(tmp_path):
    with pytest.raises(ConfigError, match="--shards=0"):
        write.write(InputConfig(dataset="synthetic:3:2:50"), str(tmp_path / "out"), shards=0)
    with pytest.raises(ConfigError, match="exists"):
        write.write(InputConfig(dataset="synthetic:3:2:50"), str(tmp_path), shards=1)


class TestDamage:
    NAME = "train-00001-of-00005.tfrecord"

    def test_a_truncated_file_is_refused(self, copy):
        content = (copy / self.NAME).read_bytes()
        for cut in (1, 10, len(content) // 2 + 7):
            (copy / self.NAME).write_bytes(content[:-cut])
            with pytest.raises(ConfigError, match=r"ends inside record \d+"):
                read(copy)

    def test_a_flipped_bit_in_a_header_is_refused(self, copy):
        content = bytearray((copy / self.NAME).read_bytes())
        content[1] ^= 1
        (copy / self.NAME).write_bytes(content)
        with pytest.raises(ConfigError, match=r"00001-of.*header of record 0 fails its checksum"):
            read(copy)

    def test_a_compressed_file_is_refused(self, copy):
        with tf.io.TFRecordWriter(str(copy / self.NAME), "GZIP") as writer:
            writer.write(b"x" * 100)
        with pytest.raises(ConfigError, match="compressed"):
            read(copy)

    def test_another_number_of_records_is_refused(self, copy):
        other = (copy / "validation-00000-of-00005.tfrecord").read_bytes()
        (copy / self.NAME).write_bytes(other)
        with pytest.raises(ConfigError, match=r"holds 8 records, but features.json says 80"):
            read(copy)

    def test_an_empty_file_has_no_records(self, tmp_path):
        (tmp_path / "x").touch()
        offsets, lengths = records.scan_tfrecord(str(tmp_path / "x"))
        assert len(offsets) == len(lengths) == 0

    def test_a_slice_beyond_the_file_is_refused(self, shards):
        with pytest.raises(ConfigError, match="holds 80 records where 85 are expected"):
            records.TFRecordReader([records.FileSlice(str(shards / self.NAME), 5, 80)])

    def test_an_invalid_sidecar_is_refused(self, copy):
        sidecar = copy / "features.json"
        content = json.loads(sidecar.read_text())
        for broken in ("{", json.dumps({**content, "format": "other"}), json.dumps({"format": content["format"]})):
            sidecar.write_text(broken)
            with pytest.raises(ConfigError, match=r"features.json', which describes the records"):
                read(copy)
        sidecar.unlink()
        with pytest.raises(ConfigError, match=r"python -m tfpar.inputs.write creates it"):
            read(copy)

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("records", [], r"its records is \[\]"),
            ("class_names", 3, "its class_names is 3"),
            ("num_classes", "10", "its num_classes is '10'"),
            ("num_classes", -10, "its num_classes is -10, not a number of classes"),
            ("task", None, "its task is None"),
            ("task", "regression", "its task is 'regression', not 'classification' or 'language_model'"),
            ("text", "utf8", "its text is 'utf8', not '' or 'bytes'"),
            ("text", [], r"its text is \[\]"),
            ("input_shape", [8, "8", 1], r"the shape of x is \[8, '8', 1\]"),
            ("label_shape", [-1], r"the shape of y is \[-1\]"),
            ("scale", "x", "its scale is 'x'"),
            ("scale", [1.0], "its scale has 1 factors, not one for each input"),
            ("input_dtype", 3, "its input_dtype is 3"),
        ],
    )
    def test_a_sidecar_that_was_edited_is_refused(self, copy, key, value, said):
        sidecar = copy / "features.json"
        sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {key: value}))
        with pytest.raises(ConfigError, match=rf"features.json', which describes the records: {said}\. python -m"):
            read(copy)

    def test_a_pattern_without_matches_is_refused(self, tmp_path):
        for argument in ("", tmp_path, f"{tmp_path}/*.tfrecord"):
            with pytest.raises(ConfigError, match=r"no file matches.*tfpar.inputs.write"):
                read(argument)

    def test_matches_in_two_directories_are_refused(self, shards, copy):
        (copy / "a").mkdir()
        (copy / "b").mkdir()
        for folder in "ab":
            (copy / folder / "x.tfrecord").touch()
        with pytest.raises(ConfigError, match="matches lie in 2 directories"):
            read(f"{copy}/*/x.tfrecord")


class TestRecordReader:
    @pytest.fixture
    def paths(self, tmp_path):
        paths = []
        for file in range(4):
            paths.append(str(tmp_path / f"{file}.tfrecord"))
            with tf.io.TFRecordWriter(paths[-1]) as writer:
                for record in range(5):
                    writer.write(f"{file}.{record}".encode() * (record + 1))
        return paths

    def expected(self, index: int) -> bytes:
        file, record = divmod(index, 5)
        return f"{file}.{record}".encode() * (record + 1)

    @pytest.mark.parametrize("open_files", [0, 2, 256])
    @pytest.mark.parametrize("address", ["", "file://"])
    def test_records_can_be_read_in_any_order(self, paths, open_files, address, monkeypatch):
        monkeypatch.setattr(records, "_MAX_OPEN_FILES", open_files)
        reader = records.TFRecordReader([records.FileSlice(address + path) for path in paths])
        indices = np.array([19, 0, 7, 7, 3, 12])
        assert reader.read(indices).tolist() == [self.expected(index) for index in indices]

    def test_slices_number_records_consecutively(self, paths):
        slices = [records.FileSlice(paths[1], 2, 2), records.FileSlice(paths[0], 4), records.FileSlice(paths[3], 1, 1)]
        reader = records.TFRecordReader(slices)
        assert reader.records_per_file == (2, 1, 1)
        assert reader.read(np.arange(4)).tolist() == [self.expected(index) for index in (7, 8, 4, 16)]

    def test_offsets_match_tensorflows_records(self, paths):
        offsets, lengths = records.scan_tfrecord(paths[2])
        content = pathlib.Path(paths[2]).read_bytes()
        found = [content[start : start + size] for start, size in zip(offsets, lengths, strict=True)]
        assert found == list(tf.data.TFRecordDataset(paths[2]).as_numpy_iterator())

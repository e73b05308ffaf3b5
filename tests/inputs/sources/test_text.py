"""Byte-level language modelling: windows, held-out files, the standard library."""

from __future__ import annotations

import os
import pathlib

from tests import permissions
from tests.inputs.helpers import fetch_all
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source

import numpy as np
import pytest


def build(path, split="train", **options):
    return build_source(InputConfig(dataset=f"text:{path}", **{"sequence_length": 16, **options}), split)


@pytest.fixture
def folder(tmp_path):
    for number in range(30):
        path = tmp_path / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"<{number}>".encode() * (10 + number))
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret")
    return tmp_path


def test_each_byte_is_predicted_once_from_the_preceding_bytes(tmp_path):
    content = bytes(range(1, 101))
    (tmp_path / "a.bin").write_bytes(content)
    (tmp_path / "b.bin").write_bytes(content[::-1])
    source = build(tmp_path, validation_fraction=0.0)
    x, y = fetch_all(source)
    stream = np.frombuffer(content + b"\0" + content[::-1] + b"\0", np.uint8)
    assert source.info.num_examples == (len(stream) - 1) // 16
    assert x.dtype == y.dtype == np.int32
    assert np.array_equal(y.ravel(), stream[1 : 1 + y.size])
    assert np.array_equal(x.ravel(), stream[: x.size])
    # A window across two files belongs to the file in which it starts.
    assert source.info.records_per_file == (7, 5)


def test_whole_files_are_held_out(folder):
    train, validation = build(folder, validation_fraction=0.3), build(folder, "validation", validation_fraction=0.3)
    assert set(train.info.files).isdisjoint(validation.info.files)
    assert len(train.info.files) + len(validation.info.files) == 30
    assert len(validation.info.files) == 9
    assert "secret" not in train.info.decode(fetch_all(train)[0]) + train.info.decode(fetch_all(validation)[0])
    for source in (train, validation):
        expected = b"".join(pathlib.Path(path).read_bytes() + b"\0" for path in source.info.files)
        assert fetch_all(source)[0].astype(np.uint8).tobytes() == expected[: source.info.num_examples * 16]


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    train, validation = build(path, validation_fraction=0.1), build(path, "validation", validation_fraction=0.1)
    assert set(np.unique(fetch_all(train)[0])) == {ord("a")}
    assert set(np.unique(fetch_all(validation)[0])) == {ord("b")}


@pytest.mark.parametrize(("fraction", "held"), [(0.0, 0), (0.001, 1), (0.5, 15), (0.9, 27)])
def test_both_splits_have_files(folder, fraction, held):
    assert len(build(folder, "validation", validation_fraction=fraction).info.files) == held


def test_patterns_select_files(folder):
    source = build(f"{folder}/**/1*.txt", validation_fraction=0.0)
    names = [os.path.relpath(path, folder) for path in source.info.files]
    assert names == sorted(names)
    assert set(names) == {f"part{n % 3}/{n}.txt" for n in (1, *range(10, 20))}


def test_held_out_files_do_not_depend_on_the_location_of_the_folder(folder, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved") / "elsewhere"
    os.rename(folder, moved)
    after = [os.path.relpath(path, moved) for path in build(moved, "validation").info.files]
    os.rename(moved, folder)
    before = [os.path.relpath(path, folder) for path in build(folder, "validation").info.files]
    assert after == before


def test_standard_library_is_the_default():
    train, validation = (build_source(InputConfig(dataset="text"), split) for split in ("train", "validation"))
    files = [*train.info.files, *validation.info.files]
    names = {os.path.basename(path) for path in files}
    assert {"argparse.py", "typing.py", "zipfile.py"} & names
    assert all(path.endswith(".py") for path in files)
    assert not any("site-packages" in path or "/test/" in path or "/tests/" in path for path in files)
    assert train.info.num_examples > 20_000
    assert 0.02 < validation.info.num_examples / train.info.num_examples < 0.3
    assert "import " in train.info.decode(train.fetch(np.arange(50))[0].numpy())


def test_files_can_be_distributed_over_workers(folder):
    options = InputConfig(dataset=f"text:{folder}", sequence_length=16, global_batch_size=6, shard_by="file")
    source = build_source(options, "train")
    pipeline = Pipeline(source, options, replicas=2, workers=2)
    seen = []
    for worker in range(2):
        for x, _, weight in pipeline.dataset(worker).take(pipeline.steps_per_epoch).as_numpy_iterator():
            seen += [row.tobytes() for row in x[weight > 0]]
    assert sorted(seen) == sorted(row.tobytes() for row in fetch_all(source)[0])


def test_files_that_may_not_be_seen_are_not_called_missing(tmp_path):
    folder = tmp_path / "private" / "texts"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(bytes(1000))
    said = r"--dataset=text:.*private.*: '.*private.*' cannot be read \(Permission denied\)"
    parent, file = folder.parent, folder / "a.txt"
    for closed, path in ((parent, folder), (parent, file), (folder, folder), (folder, parent)):
        with permissions.of(closed, 0), pytest.raises(ConfigError, match=said):
            build(path)


def test_missing_and_short_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--dataset=text:.*nowhere: no such file"):
        build(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no files below such a directory"):
        build(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ConfigError, match=r"is empty. It needs more text than one window of --sequence_length=16"):
        Pipeline(build(tmp_path / "short.txt"), InputConfig(sequence_length=16))

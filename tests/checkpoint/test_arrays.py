"""Arrays that several workers save in parts: any other division reads them, each worker only what it needs."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

from tfpar.checkpoint import format as checkpoint_files
from tfpar.checkpoint.arrays import Part, SavedArrays, index_from_json, index_of, read_arrays, write_arrays
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer
from tfpar.parallel.division import Shards, Split

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.without_keras


WHOLE = {
    "model/kernel": np.arange(6 * 24, dtype=np.float32).reshape(6, 24),
    "model/table": np.arange(12 * 3, dtype=np.float32).reshape(12, 3),
    "model/scale": np.arange(5, dtype=np.float64),
    "optimizer/iterations": np.array(7, np.int64),
    "model/nothing": np.zeros((0, 4), np.float32),
}
AXES = {"model/kernel": (1, 3), "model/table": (0, 1)}  # kernel: query, key and value side by side


def part_of(name: str, size: int, rank: int) -> Part:
    axis, groups = AXES[name]
    return Part(WHOLE[name].shape, Split(axis, size, groups).ranges(WHOLE[name].shape, rank))


def write(directory: pathlib.Path, size: int) -> list[str]:
    """The files that `size` workers write."""
    names = [f"{rank}.safetensors" for rank in range(size)]
    for rank, file in enumerate(names):
        parts = {name: part_of(name, size, rank) for name in AXES}
        arrays = {name: Split(AXES[name][0], size, AXES[name][1]).part(WHOLE[name], rank) for name in AXES}
        undivided = sorted(set(WHOLE) - set(AXES))
        arrays |= {name: WHOLE[name] for place, name in enumerate(undivided) if place % size == rank}
        write_arrays(directory / file, arrays, parts)
    return names


@pytest.mark.parametrize("size", [2, 4])
def test_any_other_division_reads_the_parts(tmp_path, size):
    names = write(tmp_path, size)
    index = index_of([tmp_path / name for name in names])
    index = index_from_json(json.loads(json.dumps(checkpoint_files.index_as_json(index))), names)
    verified: list[str] = []
    saved = SavedArrays(tmp_path, names, lambda path: verified.append(path.name), index)
    assert set(saved) == set(WHOLE)
    assert not verified
    for name, value in WHOLE.items():
        assert saved.shape(name) == value.shape
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
        assert saved[name].dtype == value.dtype
    for name, (axis, groups) in AXES.items():
        for other in (1, 2, 4):
            for rank in range(other):
                split = Split(axis, other, groups)
                np.testing.assert_array_equal(
                    saved.read(name, part_of(name, other, rank)), split.part(WHOLE[name], rank)
                )
    across = Part((6, 24), {0: ((2, 3),)})  # along another dimension than it was saved
    np.testing.assert_array_equal(saved.read("model/kernel", across), WHOLE["model/kernel"][2:5])
    assert sorted(verified) == names  # each once


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12)), min_size=1, max_size=4))
def test_any_stretches(tmp_path_factory, stretches):
    directory = tmp_path_factory.mktemp("arrays")
    names = write(directory, 4)
    saved = SavedArrays(directory, names, lambda path: None, index_of([directory / name for name in names]))
    inside = tuple((start, min(length, 12 - start)) for start, length in stretches)
    expected = np.concatenate([WHOLE["model/table"][start : start + length] for start, length in inside])
    wanted = Part((12, 3), {0: inside})
    if sum(length for _, length in inside):
        np.testing.assert_array_equal(saved.read("model/table", wanted), expected)
    shutil.rmtree(directory)


DIVISIONS = [
    Shards.of((12, 3), 1),
    Shards.of((12, 3), 5),
    Shards.of((12, 3), 40),  # some have nothing but padding
    Shards.of((12, 3), 2, within=Split.padded(0, 5, 12)),
    Shards.of((12, 3), 4, within=Split.padded(1, 2, 3)),
    Split(0, 3),
    Split(1, 3),
]


@pytest.mark.parametrize("saved_as", [None, *DIVISIONS])
def test_any_division_reads_what_any_has_written(tmp_path, saved_as):
    table = WHOLE["model/table"]
    names = ["0.safetensors"]
    if saved_as is None:
        write_arrays(tmp_path / names[0], {"table": table})
    else:
        parts = {
            f"{rank}.safetensors": (part, Part(table.shape, saved_as.ranges(table.shape, rank)))
            for rank in range(saved_as.size)
            if (part := saved_as.without_padding(saved_as.part(table, rank), rank, table.shape)).size
        }
        names = [*parts]
        for file, (part, place) in parts.items():
            write_arrays(tmp_path / file, {"table": np.ascontiguousarray(part)}, {"table": place})
    index = index_of([tmp_path / name for name in names])
    index = index_from_json(json.loads(json.dumps(checkpoint_files.index_as_json(index))), names)
    saved = SavedArrays(tmp_path, names, lambda path: None, index)
    assert saved.shape("table") == table.shape
    np.testing.assert_array_equal(saved["table"], table)
    for split in DIVISIONS:
        for rank in range(split.size):
            part = saved.read("table", Part(table.shape, split.ranges(table.shape, rank)))
            expected = split.part(table, rank)
            np.testing.assert_array_equal(split.with_padding(part, expected.shape), expected)
    for axis in (0, 1):
        wanted = Part(table.shape, {axis: ((1, 1), (0, 2))})
        np.testing.assert_array_equal(saved.read("table", wanted), table.take([1, 0, 1], axis=axis))


TYPES = {
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "C64": np.complex64,
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}".lower()) for kind in "IU" for bits in (8, 16, 32, 64)},
    "BOOL": np.bool_,
}


@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_numbers_keeps_its_bits(tmp_path, name):
    kind = np.dtype(TYPES[name])
    numbers = np.random.default_rng(0).integers(0, 2 if name == "BOOL" else 256, (6, 4 * kind.itemsize), np.uint8)
    table = numbers.view(kind)
    others = {"number": np.array(table[1, 2]), "nothing": table[:0]}
    halves = [Part((6, 4), {0: ((start, 3),)}) for start in (0, 3)]
    write_arrays(tmp_path / "0", {"table": table[:3], **others}, {"table": halves[0]})
    write_arrays(tmp_path / "1", {"table": table[3:]}, {"table": halves[1]})
    assert f'"dtype":"{name}"'.encode() in (tmp_path / "1").read_bytes()
    saved = SavedArrays(tmp_path, ["0", "1"], lambda path: None, index_of([tmp_path / "0", tmp_path / "1"]))
    across = Part((6, 4), {0: ((2, 2),), 1: ((1, 3),)})
    for read, written in [
        (saved["table"], table),
        (saved.read("table", across), table[2:4, 1:]),
        *((saved[other], others[other]) for other in others),
        *((read_arrays(tmp_path / "0")[other], others[other]) for other in others),
    ]:
        assert (read.dtype, read.shape) == (kind, written.shape)
        assert read.tobytes() == written.tobytes()


def test_parts_of_earlier_versions_are_read(tmp_path):
    """They had one divided dimension."""
    table = WHOLE["model/table"]
    names = ["0.safetensors", "1.safetensors"]
    for file, part in zip(names, np.split(table, 2), strict=True):
        write_arrays(tmp_path / file, {"table": part})
    index = {
        "table": [
            {"file": name, "part": {"shape": [12, 3], "axis": 0, "stretches": [[6 * rank, 6]]}}
            for rank, name in enumerate(names)
        ]
    }
    saved = SavedArrays(tmp_path, names, lambda path: None, index_from_json(index, names))
    np.testing.assert_array_equal(saved["table"], table)


def test_a_worker_opens_only_the_files_that_it_needs(tmp_path):
    names = write(tmp_path, 4)
    opened: list[str] = []
    saved = SavedArrays(
        tmp_path, names, lambda path: opened.append(path.name), index_of([tmp_path / name for name in names])
    )
    half = part_of("model/table", 2, 1)
    assert saved.files_of("model/table", half) == ["2.safetensors", "3.safetensors"]
    saved.read("model/table", half)
    assert opened == ["2.safetensors", "3.safetensors"]
    assert saved.files_of("model/table") == names


GOOD = {"file": "0.safetensors", "part": {"shape": [4, 2], "axis": 0, "stretches": [[0, 2]]}}


def with_part(**changes: object) -> dict[str, object]:
    return {**GOOD, "part": {**GOOD["part"], **changes}}


def with_ranges(ranges: object) -> dict[str, object]:
    return {**GOOD, "part": {"shape": [4, 2], "ranges": ranges}}


EVERY = [[start, 1] for start in range(4000)]


@pytest.mark.parametrize(
    "index",
    [
        [],
        {"a": None},
        {"a": []},
        {"a": [7]},
        {"a": [{"file": "elsewhere"}]},
        {"a": [{"file": "0.safetensors"}, {"file": "1.safetensors"}]},  # whole in two files
        {"a": [GOOD]},  # the other half is missing
        {"a": [GOOD, with_part(stretches=[[3, 1]])]},
        {"a": [GOOD, with_part(stretches=[[2, 3]])]},
        {"a": [GOOD, with_part(shape=[5, 2], stretches=[[2, 3]])]},
        {"a": [GOOD, with_part(axis=2)]},
        {"a": [GOOD, with_part(axis=True)]},
        {"a": [GOOD, with_part(stretches=[[2, 1 << 50]])]},
        {"a": [GOOD, with_part(stretches="ab")]},
        {"a": [with_part(axis=None, stretches=[[0, 3], [3, 5]])]},
        {"a": [GOOD, with_ranges({"0": [[2, 2]], "1": [[0, 1]]})]},  # one column of the other half
        {"a": [with_ranges({"0": [[0, 4]], "2": [[0, 1]]})]},
        {"a": [with_ranges([[0, 4]])]},
        {"a": [with_ranges({"rows": [[0, 4]]})]},
        {"a": [{"file": "0.safetensors", "part": {"shape": [4000] * 4, "ranges": {str(n): EVERY for n in range(4)}}}]},
        {"a": [GOOD, with_part(shape=None)]},
        {"a": [GOOD, {"file": "1.safetensors", "part": None}]},
    ],
)
def test_an_index_with_anything_else_in_it_is_damaged(index):
    with pytest.raises(ValueError, match=r"index|part"):
        index_from_json(index, ["0.safetensors", "1.safetensors"])
    index_from_json({"a": [GOOD, with_part(stretches=[[2, 2]])]}, ["0.safetensors"])
    columns = [with_ranges({"0": [[2, 2]], "1": [[column, 1]]}) for column in range(2)]
    index_from_json({"a": [GOOD, *columns]}, ["0.safetensors"])


def checkpoint(step: int, rank: int, exchange: bool) -> Checkpoint:
    """What a worker of three saves, of which two hold the variables."""
    split = Split(0, 2)
    table = WHOLE["model/table"] + step
    return Checkpoint(
        step=step,
        arrays={"model/table": split.part(table, rank)} if rank < 2 else {},
        parts={"model/table": Part(table.shape, split.ranges(table.shape, rank))} if rank < 2 else {},
        exchange={"0/worker": np.full(3, rank, np.float32)} if exchange else {},
        run={},
        config={},
        state_files=2,
    )


def save(directory: pathlib.Path, step: int, *, exchange: bool = False, missing: int = -1) -> list[Checkpointer]:
    writers = [Checkpointer(directory, worker=rank, workers=3) for rank in range(3)]
    for rank, writer in enumerate(writers):
        if rank != missing:
            writer.save(checkpoint(step, rank, exchange))
    return writers


@pytest.mark.parametrize("exchange", [True, False])
def test_workers_write_a_checkpoint_between_them(tmp_path, exchange):
    for writer in save(tmp_path, 1, exchange=exchange):
        writer.close()
        assert not writer.failures
    path = tmp_path / "checkpoints" / "step-000000001"
    states = {"state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"}
    exchanges = {f"exchange-{rank}.safetensors" for rank in range(3)} if exchange else set()
    assert {file.name for file in path.iterdir()} == {*states, *exchanges, "manifest.json"}
    loaded = checkpoint_files.read(path, worker=2, workers=3)
    np.testing.assert_array_equal(loaded.arrays["model/table"], WHOLE["model/table"] + 1)
    assert set(loaded.exchange) == ({"0/worker"} if exchange else set())


def test_damage_of_a_part_counts_for_those_who_need_it(tmp_path):
    for writer in save(tmp_path, 1):
        writer.close()
    path = tmp_path / "checkpoints" / "step-000000001"
    second = path / "state-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-1] + b"?")
    with pytest.raises(ValueError, match="state-00002-of-00002"):
        checkpoint_files.read(path)
    one = checkpoint_files.read(path, needed=lambda arrays: ["state-00001-of-00002.safetensors"])
    half = Part((12, 3), {0: ((0, 6),)})
    np.testing.assert_array_equal(one.arrays.read("model/table", half), WHOLE["model/table"][:6] + 1)
    with pytest.raises(ValueError, match="state-00002-of-00002"):  # noticed before it is used
        one.arrays["model/table"]
    second.unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint_files.read(path)


def test_a_worker_that_cannot_write_its_part_is_named(tmp_path, monkeypatch):
    from tfpar.checkpoint import staging

    written = staging.write_arrays

    def full(path: pathlib.Path, *arguments: object, **options: str) -> None:
        if path.name.startswith("state-00002"):
            raise OSError(28, "No space left on device")
        written(path, *arguments, **options)

    monkeypatch.setattr(staging, "write_arrays", full)
    chief, second, third = save(tmp_path, 1)
    for writer in (second, third, chief):
        writer.close()
    assert "worker 1 could not write its part of the weights" in chief.failures[0]
    assert "No space left" in second.failures[0]
    assert not third.failures
    assert not chief.steps()


def test_arrays_of_any_layout_are_written_with_their_values(tmp_path):
    """safetensors 0.8 writes the memory of an array as it lies."""
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"turned": table.T, "thinned": table[:, ::2], "scalar": table.sum(), "none": np.array(5, np.int64)}
    write_arrays(tmp_path / "file", arrays)
    for name, read in read_arrays(tmp_path / "file").items():
        np.testing.assert_array_equal(read, arrays[name], strict=True)


def test_who_may_read_a_file_depends_on_the_umask(tmp_path):
    """Members of a team evaluate and continue each other's checkpoints."""
    before = os.umask(0o027)
    try:
        write_arrays(tmp_path / "file", WHOLE)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["file"]

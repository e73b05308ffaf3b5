"""Every kind of damage to every file of a checkpoint is noticed, and what is whole is used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import shutil

from tests import permissions
from tfpar.checkpoint import checkpointer
from tfpar.checkpoint import format as checkpoint_files
from tfpar.checkpoint import resume as resuming
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer, CheckpointError
from tfpar.config import ConfigError

import numpy as np
import pytest

pytestmark = pytest.mark.without_keras


WORKERS = 2
FILES = ["manifest.json", "state.safetensors", "exchange-0.safetensors", "exchange-1.safetensors"]
# Lengths and places as shares of a file: its first byte, its header, its middle, its end.
PLACES = [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999, 1.0]


def checkpoint(step: int, *, exchange: bool = True) -> Checkpoint:
    generator = np.random.default_rng(step)
    return Checkpoint(
        step=step,
        arrays={
            "model/kernel": generator.normal(size=(40, 30)).astype(np.float32),
            "optimizer/iterations": np.array(step),
        },
        exchange={"0/worker": generator.normal(size=500).astype(np.float32)} if exchange else {},
        run={"best": 0.5},
        config={"seed": 1},
    )


def save(workdir: pathlib.Path, *steps: int, workers: int = WORKERS, best: int = 0) -> pathlib.Path:
    """Saves as all workers together; returns the directory of the checkpoints."""
    writers = [Checkpointer(workdir, worker=worker, workers=workers, keep=9) for worker in range(workers)]
    for step in steps:
        for writer in writers:
            writer.save(checkpoint(step, exchange=workers > 1), best=step == best)
        for writer in writers:
            writer.wait()
    for writer in writers:
        writer.close()
        assert not writer.failures
    return workdir / "checkpoints"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("saved")
    directory = save(workdir, 1, 2)
    assert sorted(path.name for path in (directory / "step-000000002").iterdir()) == sorted(FILES)
    return workdir


@pytest.fixture
def workdir(saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run"))


def reader_of(file: str) -> int:
    """The worker that reads a file when as many resume as saved."""
    return 1 if file == "exchange-1.safetensors" else 0


def expect_the_one_before(workdir: pathlib.Path, file: str, what: str, messages: list[str]) -> None:
    for worker, workers in ((reader_of(file), WORKERS), (0, 3), (2, 3), (0, 1)):  # as before, and elastic
        reader = Checkpointer(workdir, worker=worker, workers=workers)
        loaded = reader.latest()
        reader.close()
        assert loaded is not None, (what, worker, workers)
        assert loaded.step == 1, (what, worker, workers)
        assert list(reader.damaged) == [2], what
        assert reader.damaged[2].startswith(file), what
        assert messages == [
            f"WARNING: checkpoint of step 2 is damaged ({reader.damaged[2]}); trying the one before it"
        ] * (worker == 0), what
        messages.clear()
        np.testing.assert_array_equal(loaded.arrays["model/kernel"], checkpoint(1).arrays["model/kernel"])


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file_is_noticed(workdir, file, messages):
    path = workdir / "checkpoints" / "step-000000002" / file
    content = path.read_bytes()
    for share in PLACES[:-1]:
        length = int(share * len(content))
        path.write_bytes(content[:length])
        expect_the_one_before(workdir, file, f"{file} cut to {length} of {len(content)}", messages)
    path.write_bytes(content[:-1])
    expect_the_one_before(workdir, file, f"{file} without its last byte", messages)
    path.write_bytes(content + b"\0")
    expect_the_one_before(workdir, file, f"{file} with a byte too many", messages)
    path.unlink()
    expect_the_one_before(workdir, file, f"{file} missing", messages)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_noticed(workdir, file, messages):
    path = workdir / "checkpoints" / "step-000000002" / file
    content = path.read_bytes()
    for number, share in enumerate(PLACES):
        position = min(int(share * len(content)), len(content) - 1)
        flipped = bytearray(content)
        flipped[position] ^= 1 << (number % 8)
        path.write_bytes(bytes(flipped))
        expect_the_one_before(workdir, file, f"{file} bit {number % 8} of byte {position}", messages)


def test_each_worker_reads_only_its_own_exchange_state_where_as_many_resume(workdir):
    (workdir / "checkpoints" / "step-000000002" / "exchange-1.safetensors").unlink()
    assert Checkpointer(workdir, worker=0, workers=WORKERS).latest().step == 2


def test_weights_alone_need_no_exchange_state(workdir):
    for file in FILES[2:]:
        (workdir / "checkpoints" / "step-000000002" / file).unlink()
    assert checkpointer.find(workdir).step == 2


def test_the_damaged_one_is_set_aside_and_does_not_count_as_the_newest(tmp_path, messages):
    directory = save(tmp_path, 1, 5, workers=1)
    state = directory / "step-000000005" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    resumed = Checkpointer(tmp_path, keep=1)
    assert resuming.newest(resumed).step == 1
    assert "step-000000005.damaged" in messages[-1]
    resumed.save(checkpoint(3, exchange=False))  # with keep=1 and the damaged one as the newest, this would go
    resumed.close()
    assert sorted(path.name for path in directory.iterdir()) == ["step-000000003", "step-000000005.damaged"]


def test_what_was_set_aside_earlier_stays(tmp_path):
    for _ in range(2):
        directory = save(tmp_path, 1, 5, workers=1)
        (directory / "step-000000005" / "state.safetensors").write_bytes(b"")
        assert resuming.newest(Checkpointer(tmp_path)).step == 1
    kept = {"step-000000005.damaged", "step-000000005.damaged-2"}
    assert kept < {path.name for path in directory.iterdir()}


def test_a_file_system_that_does_not_answer_says_nothing_of_a_checkpoint(tmp_path, monkeypatch):
    directory = save(tmp_path, 1, 5, workers=1)

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(checkpointer, "read", stale)
        with pytest.raises(CheckpointError, match=r"step 5 .* cannot be read .*Start again"):
            resuming.newest(Checkpointer(tmp_path))
    assert resuming.newest(Checkpointer(tmp_path)).step == 5
    assert sorted(path.name for path in directory.iterdir()) == ["step-000000001", "step-000000005"]


@pytest.mark.parametrize("look", [Checkpointer, checkpointer.find, checkpointer.saved_config, checkpointer.has_any])
@pytest.mark.parametrize("mode", [0o311, 0o000])
def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(tmp_path, look, mode):
    directory = save(tmp_path, 1, workers=1)
    said = r"checkpoints in .*checkpoints cannot be listed \(Permission denied\).*Start again once .* another one"
    with permissions.of(directory, mode), pytest.raises(CheckpointError, match=said):
        look(tmp_path)
    assert Checkpointer(tmp_path).steps() == [1]


def test_a_worker_that_tidies_nothing_does_not_start_over_either(tmp_path):
    directory = save(tmp_path, 1)
    peer = Checkpointer(tmp_path, worker=1, workers=2)
    with permissions.of(directory, 0o311), pytest.raises(CheckpointError, match="cannot be listed"):
        resuming.newest(peer)


def test_a_file_system_that_does_not_answer_says_nothing_of_what_a_directory_holds(tmp_path, monkeypatch):
    save(tmp_path, 1, workers=1)

    def stale(_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    reader = Checkpointer(tmp_path)
    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(CheckpointError, match=r"cannot be listed \(Stale file handle\)"):
        resuming.newest(reader)


def test_a_file_in_place_of_the_directory_hides_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    assert Checkpointer(tmp_path).steps() == []
    assert not checkpointer.has_any(tmp_path / "checkpoints")


def test_no_run_starts_over_where_every_checkpoint_is_damaged(tmp_path):
    directory = save(tmp_path, 1, 2, workers=1)
    for path in directory.glob("*/state.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged \(steps 1, 2\).*another --workdir"):
        resuming.newest(Checkpointer(tmp_path))
    assert sorted(path.name for path in directory.iterdir()) == ["step-000000001", "step-000000002"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"step": 1}\n', b"\xff\xfe", b"null\n"])
def test_a_damaged_note_of_the_best_is_said_and_loses_no_checkpoint(tmp_path, content, messages):
    directory = save(tmp_path, 1, 2, 3, workers=1, best=1)
    assert checkpointer.find(tmp_path).step == 1
    assert messages == []
    (directory / "best.json").write_bytes(content)
    assert checkpointer.find(tmp_path).step == 3
    assert "best.json is damaged" in messages[0]
    writer = Checkpointer(tmp_path, keep=1)
    writer.save(checkpoint(4, exchange=False))
    writer.wait()
    assert writer.steps() == [1, 2, 3, 4]  # which of them was the best is not known
    writer.save(checkpoint(5, exchange=False), best=True)
    writer.close()
    assert writer.steps() == [5]


def test_a_flipped_bit_in_the_note_of_the_best_does_not_make_another_one_the_best(tmp_path, messages):
    directory = save(tmp_path, 1, 2, 3, workers=1, best=2)
    content = (directory / "best.json").read_bytes()
    (directory / "best.json").write_bytes(content.replace(b'"step": 2', b'"step": 1'))
    assert checkpointer.find(tmp_path).step == 3
    assert "does not match its checksum" in messages[0]


def test_a_damaged_best_checkpoint_is_said_and_the_newest_is_taken(tmp_path, messages):
    directory = save(tmp_path, 1, 2, 3, workers=1, best=1)
    (directory / "step-000000001" / "state.safetensors").write_bytes(b"short")
    assert checkpointer.find(tmp_path).step == 3
    assert "checkpoint of step 1" in messages[0]
    shutil.rmtree(directory / "step-000000001")
    assert checkpointer.find(tmp_path).step == 3
    assert "of step 1, is missing" in messages[1]


def rewrite(path: pathlib.Path, **changes) -> None:
    """Changes a manifest and seals it again, as damage cannot but a person can."""
    manifest = checkpoint_files.unseal(path / "manifest.json")
    changed = {key: value for key, value in {**manifest, **changes}.items() if value is not ...}
    (path / "manifest.json").write_bytes(checkpoint_files.seal(changed))


SHA = "0" * 64


MANIFESTS = [
    {"format": ...},
    {"format": [2]},
    {"step": ...},
    {"step": "1"},
    {"step": -1},
    {"step": True},
    {"step": 2.0},
    {"step": 10**40},
    {"step": 7},  # of another directory
    {"workers": ...},
    {"workers": 0},
    {"workers": 10**30},
    {"workers": 2, "files": {"state.safetensors": {"bytes": 1, "sha256": SHA}, "exchange-0.safetensors": {}}},
    {"run": ...},
    {"run": []},
    {"config": None},
    {"files": ...},
    {"files": []},
    {"files": {}},
    {"files": {"state.safetensors": None}},
    {"files": {"state.safetensors": {"bytes": 1}}},
    {"files": {"state.safetensors": {"bytes": "1", "sha256": SHA}}},
    {"files": {"state.safetensors": {"bytes": 10**30, "sha256": SHA}}},
    {"files": {"state.safetensors": {"bytes": 1, "sha256": 7}}},
]


def test_a_manifest_with_anything_else_in_it_is_damaged(tmp_path):
    path = save(tmp_path, 1, workers=1) / "step-000000001"
    content = (path / "manifest.json").read_bytes()
    for changes in MANIFESTS:
        rewrite(path, **changes)
        with pytest.raises(ValueError, match=r"manifest\.json|format"):
            checkpoint_files.read(path)
        with pytest.raises(ConfigError, match="every checkpoint"):
            resuming.newest(Checkpointer(tmp_path))
        (path / "manifest.json").write_bytes(content)
        assert checkpoint_files.read(path).step == 1


def test_no_file_outside_the_directory_is_read(tmp_path):
    directory = save(tmp_path, 1, workers=1)
    path = directory / "step-000000001"
    files = checkpoint_files.unseal(path / "manifest.json")["files"]
    shutil.copy(path / "state.safetensors", directory / "outside.safetensors")
    for name in (
        "../outside.safetensors",
        "/etc/passwd",
        "exchange-0.safetensors/../../x",
        "exchange--1.safetensors",
        "",
    ):
        rewrite(path, files={**files, name: files["state.safetensors"]})
        with pytest.raises(ValueError, match="not the name of a checkpoint file"):
            checkpoint_files.read(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "7", "{'a': 1}", '{"format": NaN}'])
def test_a_sealed_text_that_is_no_manifest(tmp_path, text):
    content = (text + "\n").encode()
    (tmp_path / "manifest.json").write_bytes(content + hashlib.sha256(content).hexdigest().encode() + b"\n")
    with pytest.raises(ValueError, match=r"manifest\.json|format|property name"):
        checkpoint_files.read(tmp_path)


def tensors(header: object, data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def test_a_safetensors_file_made_by_somebody_else(tmp_path):
    path = save(tmp_path, 1, workers=1) / "step-000000001"
    for content in (
        b"",
        tensors({}, b"", length=2**64 - 1),
        tensors({}, b"", length=100),
        tensors([], b""),
        tensors({"a": {"dtype": "F9", "shape": [1], "data_offsets": [0, 1]}}, b"0"),
        tensors({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, b"0000"),
        tensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"0000"),
    ):
        (path / "state.safetensors").write_bytes(content)
        fingerprint = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        rewrite(path, files={"state.safetensors": fingerprint})
        with pytest.raises(ValueError, match=r"state\.safetensors cannot be read"):
            checkpoint_files.read(path)

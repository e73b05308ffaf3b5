"""`model.keras` of models whose weights are divided, block by block."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import sys
import tracemalloc
import zipfile

import tfpar
from tests import nursery
from tests.integration.scripts import divided
from tests.training.test_tensor_parallel import assert_saved_whole
from tfpar.checkpoint import export
from tfpar.incremental.online.exports import Exports
from tfpar.incremental.report import write_json
from tfpar.monitor.summary import replica_digests
from tfpar.parallel import split
from tfpar.parallel.split import whole, whole_blocks

import keras
import numpy as np
import pytest
import tensorflow as tf

MESHES = ["model:2", "pipeline:2", "data:2"]
SMALL, LARGE = 1 << 8, 32 << 20


@pytest.mark.parametrize("mesh", MESHES)
def test_a_file_holds_the_whole_model(mesh, tmp_path, monkeypatch):
    """In blocks of a part of a weight, or of all of it; they are the whole value in order."""
    monkeypatch.setattr(split, "_BLOCK_BYTES", SMALL)
    trainer = divided.here("mirrored", mesh, model="language_model", steps=2, workdir=str(tmp_path / "run"))
    assert_saved_whole(trainer, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").glob("*.keras")} == {"model.keras"}
    assert assert_blocks_are_the_whole_value(trainer, SMALL)
    monkeypatch.setattr(split, "_BLOCK_BYTES", LARGE)
    assert_blocks_are_the_whole_value(trainer, LARGE)
    weights = trainer.model.trainable_variables
    assert set(replica_digests(trainer.strategy, weights)) == {trainer.results["params_sha256"]}
    export.export_model(trainer.model, weights, tmp_path / "large" / "model.keras")
    assert_saved_whole(trainer, tmp_path / "large")
    assert {path.name for path in (tmp_path / "large").iterdir()} == {"model.keras"}


def assert_blocks_are_the_whole_value(trainer: tfpar.Trainer, block_bytes: int) -> int:
    """Returns how many values had several blocks."""
    several = 0
    for variable in [*trainer.model.variables, *trainer.optimizer.variables]:
        for copy in range(len(split.copies_of(variable))):
            blocks = list(whole_blocks(variable, copy))
            several += len(blocks) > 1
            assert all(block.nbytes <= max(block_bytes, whole(variable).nbytes // 2) for block in blocks[1:])
            found = np.concatenate([block.reshape(-1) for block in blocks])
            np.testing.assert_array_equal(found, whole(variable).reshape(-1))
    return several


def test_averages_are_saved_in_place_of_weights(tmp_path):
    trainer = divided.here("mirrored", "model:2", steps=4, ema=0.5, workdir=str(tmp_path))
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    averages = trainer.program.eval_weights()
    for variable, average, weight in zip(
        loaded.trainable_variables, averages, trainer.model.trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(variable.numpy(), whole(average))
        assert average is not weight


def test_all_blocks_are_read_if_the_disk_is_full(tmp_path, monkeypatch):
    """The other workers send them: a chief that stopped would leave them waiting."""
    trainer = divided.made_here("mirrored", "model:2")
    read = []

    def counted(variable):
        for block in whole_blocks(variable):
            yield block
            read.append(variable.path)

    class Full:
        written = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def seek(self, *_):
            return 0

        def write(self, data):
            self.written += len(data)
            if self.written > 2000:
                raise OSError(28, "No space left on device")

        def flush(self):
            pass

    monkeypatch.setattr(export, "whole_blocks", counted)
    monkeypatch.setattr(export.tempfile, "TemporaryFile", lambda **_: Full())
    weights = trainer.model.trainable_variables
    with pytest.raises(OSError, match="No space left"):
        export.export_model(trainer.model, weights, tmp_path / "model.keras")
    on_chief, read[:] = read[:], []
    export.export_model(trainer.model, weights, None)
    assert {*on_chief} == {*read}
    assert not list(tmp_path.iterdir())


def test_a_folder_becomes_the_file_that_keras_would_write(tmp_path, monkeypatch):
    """With what a layer keeps besides weights, and without the weights in Python's memory."""
    monkeypatch.chdir(tmp_path)
    words = keras.layers.StringLookup(output_mode="one_hot")
    words.adapt(["north", "south"])
    inside = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(512) for _ in range(8))])
    text = keras.Input((1,), dtype="string")
    model = keras.Model(text, inside(words(text)))
    size = sum(weight.numpy().nbytes for weight in model.weights)
    (tmp_path / "folder.folder").mkdir()  # of an attempt that was killed
    (tmp_path / "folder.folder" / "rest").write_text("")
    peaks = {}
    for name, write in (("keras", keras.Model.save), ("folder", export._write_in_folder)):
        tracemalloc.start()
        write(model, pathlib.Path(f"{name}.keras"))  # a relative path, as --workdir often is
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks["folder"] < 0.5 * size < peaks["keras"]
    assert {path.name for path in tmp_path.iterdir()} == {"keras.keras", "folder.keras"}
    names = [sorted(zipfile.ZipFile(path).namelist()) for path in sorted(tmp_path.iterdir())]
    assert names[0] == names[1]
    assert any(name.endswith("vocabulary.txt") for name in names[0])
    loaded = keras.saving.load_model("folder.keras")
    rows = tf.constant([["south"], ["west"]])
    np.testing.assert_array_equal(loaded(rows), model(rows))


def test_a_full_disk_is_named_in_one_line(tmp_path):
    """In a process whose files may not be longer than 100 kB. Nothing is left behind."""
    code = """
import pathlib, resource, sys
import keras
from tfpar.checkpoint import export
from tfpar.incremental.online.exports import Exports
from tfpar.incremental.report import write_json
model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(400)])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    export._write_in_folder(model, pathlib.Path(sys.argv[1]))
except OSError as error:
    print("found:", error)
"""
    done = nursery.run([sys.executable, "-c", code, str(tmp_path / "model.keras")], capture_output=True, text=True)
    assert re.search(r"^found: \[Errno 27\] File too large$", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Or the name would lead to an empty file after the power failed, and a finished run would have no model."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def noted_replace(source, target) -> None:
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    export.export_model(model, model.trainable_variables, tmp_path / "model.keras")
    assert events == [".model.partial.keras", "replace", "."]
    events.clear()
    exports = Exports(str(tmp_path), keep=2)
    exports.add(1, {"version": 1})
    assert events[:3] == ["exports/.000001/about.json", "exports/.000001", "exports"]
    monkeypatch.setattr(os, "link", lambda *_: os.lstat(tmp_path / "none"))  # a file system without links
    events.clear()
    exports.add(2, {"version": 2})
    assert events[0] == "exports/.000002/model.keras"
    write_json(tmp_path / "task.json", {})
    assert events[-2:] == [".task.json", "replace"]


def test_a_model_whose_name_cannot_be_flushed_is_written_all_the_same(tmp_path, monkeypatch, messages):
    fsync = os.fsync

    def of_files_alone(descriptor: int) -> None:
        if pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    export.export_model(model, model.trainable_variables, tmp_path / "model.keras")
    assert len(keras.saving.load_model(tmp_path / "model.keras").weights) == 2
    said = f"WARNING: model.keras is written, but {tmp_path} cannot be flushed (Input/output error)"
    assert [message[: len(said)] for message in messages] == [said]


class Unsaved(keras.layers.Layer):
    """Keras cannot save it: it takes an object, and says nothing about it."""

    def __init__(self, table, **options):
        super().__init__(**options)
        self.table = table

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


@pytest.mark.parametrize("mesh", ["", "pipeline:2"])
def test_a_model_that_keras_cannot_save_is_trained_and_summarised(tmp_path, messages, mesh):
    def build() -> keras.Model:
        tokens, table = keras.Input((4,), dtype="int32"), keras.layers.Embedding(16, 8)
        return keras.Model(tokens, Unsaved(table)(keras.layers.Dense(8)(table(tokens))))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"loss": loss, "steps": 2, "global_batch_size": 8, "mesh": mesh, "workdir": str(tmp_path)}
    options["jit_compile"] = "false"
    tokens = np.zeros((16, 4), np.int32)
    result = tfpar.Trainer(build, **options).fit(tokens, tokens)
    said = "Keras cannot save this model (Object Unsaved was created by passing non-serializable"
    assert sum(line.startswith(f"WARNING: {said}") for line in messages) == 1
    assert [each.partition(":")[0] for each in result["failed_writes"]] == ["model.keras"]
    assert json.loads((tmp_path / "summary.json").read_text())["failed_writes"] == result["failed_writes"]
    assert not list(tmp_path.glob("*.keras"))
    with pytest.raises(tfpar.ConfigError, match="--on_checkpoint_error=fail: Keras cannot save this model"):
        tfpar.Trainer(build, **options | {"workdir": str(tmp_path / "other")}, on_checkpoint_error="fail").fit(
            tokens, tokens
        )

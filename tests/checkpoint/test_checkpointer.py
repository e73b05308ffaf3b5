"""Checkpoints are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import threading

from tfpar.checkpoint import checkpointer as checkpoints
from tfpar.checkpoint import resume as resuming
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer
from tfpar.checkpoint.format import UnknownFormatError

import numpy as np
import pytest

pytestmark = pytest.mark.without_keras


def checkpoint(step: int, value: float = 0.0, exchange: dict | None = None) -> Checkpoint:
    return Checkpoint(
        step=step,
        arrays={"model/dense/kernel": np.full((3, 4), value, np.float32), "optimizer/iterations": np.asarray(step)},
        exchange=exchange or {},
        run={"best": value},
        config={"seed": 1},
    )


@pytest.fixture
def checkpointer(tmp_path, messages):
    made = Checkpointer(tmp_path, keep=2)
    yield made
    made.close()


def test_round_trip(checkpointer):
    checkpointer.save(checkpoint(7, 1.5))
    checkpointer.wait()
    loaded = checkpointer.latest()
    assert loaded.step == 7
    np.testing.assert_array_equal(loaded.arrays["model/dense/kernel"], np.full((3, 4), 1.5, np.float32))
    assert loaded.arrays["optimizer/iterations"].shape == ()
    assert loaded.run == {"best": 1.5}
    assert loaded.config == {"seed": 1}


def test_keeps_the_newest_and_the_best(checkpointer, tmp_path):
    for step in range(1, 6):
        checkpointer.save(checkpoint(step), best=step == 2)
    checkpointer.wait()
    assert checkpointer.steps() == [2, 4, 5]
    assert checkpoints.find(tmp_path).step == 2


def test_no_checkpoint_is_none(checkpointer, tmp_path):
    assert checkpointer.latest() is None
    assert checkpoints.find(tmp_path) is None
    assert checkpoints.saved_config(tmp_path) is None


def test_an_interrupted_write_is_not_a_checkpoint(tmp_path, messages):
    partial = tmp_path / "checkpoints" / ".step-000000009.partial"
    partial.mkdir(parents=True)
    (partial / "state.safetensors").write_bytes(b"half")
    writer = Checkpointer(tmp_path)
    assert writer.latest() is None
    assert not partial.exists()
    writer.close()


def test_a_failed_write_warns_and_keeps_what_was_there(tmp_path, messages):
    writer = Checkpointer(tmp_path)
    writer.save(checkpoint(1))
    writer.wait()
    blocked = tmp_path / "checkpoints" / ".step-000000002.partial"
    blocked.write_text("a file where the directory should be")
    writer.save(checkpoint(2))
    writer.close()
    assert writer.steps() == [1]
    assert len(writer.failures) == 1
    assert messages == [
        "WARNING: checkpoint of step 2 could not be written (.step-000000002.partial: File exists); training "
        "continues. Checkpoints: the newest is of step 1"
    ]


def test_the_same_step_can_be_written_again(checkpointer):
    checkpointer.save(checkpoint(3, 1.0))
    checkpointer.save(checkpoint(3, 2.0))
    checkpointer.wait()
    assert checkpointer.latest().arrays["model/dense/kernel"][0, 0] == 2.0


def test_exchange_state_of_every_worker_is_in_one_checkpoint(tmp_path):
    residual = {worker: {"exchange/residual": np.full(5, worker, np.float32)} for worker in range(3)}
    writers = [Checkpointer(tmp_path, worker=worker, workers=3) for worker in range(3)]
    threads = [
        threading.Thread(target=writer.save, args=(checkpoint(4, exchange=residual[worker]),))
        for worker, writer in enumerate(writers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
    for worker in range(3):
        loaded = Checkpointer(tmp_path, worker=worker, workers=3).latest()
        np.testing.assert_array_equal(loaded.exchange["exchange/residual"], np.full(5, worker, np.float32))
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000004"]


def test_nothing_is_executed_on_reading(checkpointer, tmp_path):
    checkpointer.save(checkpoint(1))
    checkpointer.wait()
    directory = tmp_path / "checkpoints" / "step-000000001"
    header = int.from_bytes((directory / "state.safetensors").read_bytes()[:8], "little")
    assert json.loads((directory / "state.safetensors").read_bytes()[8 : 8 + header])


def test_a_checkpoint_of_another_version_is_refused_and_stays(checkpointer, tmp_path):
    for step in (1, 2):
        checkpointer.save(checkpoint(step))
    checkpointer.wait()
    path = tmp_path / "checkpoints" / "step-000000002" / "manifest.json"
    text = path.read_text().rsplit("\n", 2)[0].replace(f'"format": {checkpoints.FORMAT}', '"format": 99') + "\n"
    path.write_text(text + hashlib.sha256(text.encode()).hexdigest() + "\n")
    for read in (
        lambda: checkpoints.read(path.parent),
        lambda: checkpoints.find(tmp_path),
        lambda: checkpoints.saved_config(tmp_path),
        lambda: resuming.newest(checkpointer),
    ):
        with pytest.raises(UnknownFormatError, match=r"step-000000002 has checkpoint format 99.* version of tfpar"):
            read()
    assert checkpointer.steps() == [1, 2]

"""Frozen weights: one file under a name in each checkpoint, as long as they stay what they are."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time

from tfpar.checkpoint.arrays import Part
from tfpar.checkpoint.checkpointer import Checkpointer
from tfpar.checkpoint.format import FROZEN, Checkpoint, frozen_name, read

import numpy as np
import pytest


def checkpoint(step: int, frozen: float = 1.0) -> Checkpoint:
    arrays = {
        "model/base": np.full([1000, 10], frozen, np.float32),
        "model/flag": np.array(True),
        "model/head": np.full([3], step, np.float32),
    }
    return Checkpoint(
        step, arrays, exchange={}, run={"variables": list(arrays)}, config={}, frozen={"model/base", "model/flag"}
    )


def written(directory, *saved: Checkpoint, keep: int = 3) -> Checkpointer:
    checkpointer = Checkpointer(directory, keep=keep)
    for each in saved:
        checkpointer.save(each)
    checkpointer.close()
    assert not checkpointer.failures
    return checkpointer


def frozen_file(checkpointer: Checkpointer, step: int, worker: int = 0, workers: int = 1) -> os.stat_result:
    return (checkpointer.directory / f"step-{step:09d}" / frozen_name(worker, workers)).stat()


def values(checkpointer: Checkpointer, step: int) -> tuple[float, float]:
    arrays = checkpointer.read(step).arrays
    assert set(arrays) == {"model/base", "model/flag", "model/head"}
    assert arrays["model/flag"].shape == ()
    return float(arrays["model/base"][7, 3]), float(arrays["model/head"][0])


def test_checkpoints_have_one_file_between_them(tmp_path):
    checkpointer = written(tmp_path, *map(checkpoint, (1, 2, 3)))
    files = [frozen_file(checkpointer, step) for step in (1, 2, 3)]
    assert len({file.st_ino for file in files}) == 1
    assert files[0].st_nlink == 3
    state = (checkpointer.directory / "step-000000003" / "state.safetensors").stat()
    assert state.st_size < 1000 < 40_000 < files[0].st_size
    assert values(checkpointer, 3) == (1.0, 3.0)
    # Another process of the run continues with the file; it stays until the last checkpoint with it is removed.
    again = written(tmp_path, checkpoint(4), checkpoint(5), keep=1)
    assert again.steps() == [5]
    assert frozen_file(again, 5).st_ino == files[0].st_ino
    assert frozen_file(again, 5).st_nlink == 1
    assert values(again, 5) == (1.0, 5.0)


@pytest.mark.parametrize("divided", [False, True])
def test_each_of_several_workers_has_one_file(tmp_path, divided):
    """With its parts of frozen weights, or without any if the first worker has them whole; each writes its part of the
    other weights as well."""

    def write(worker: int) -> None:
        checkpointer = Checkpointer(tmp_path, worker=worker, workers=2)
        for step in (1, 2):
            whole = checkpoint(step).arrays
            arrays = {"model/head": np.full([3], step * (1 - 2 * worker), np.float32)}
            parts = {"model/head": Part((6,), {0: ((3 * worker, 3),)})}
            if divided:
                arrays["model/base"] = whole["model/base"][:, 5 * worker : 5 * worker + 5].copy()
                parts["model/base"] = Part((1000, 10), {1: ((5 * worker, 5),)})
            if worker == 0:
                arrays = {**whole, **arrays}
            frozen = arrays.keys() & {"model/base", "model/flag"}
            own = {"arrays": arrays, "parts": parts, "state_files": 2, "frozen": frozen}
            checkpointer.save(dataclasses.replace(checkpoint(step), **own))
            while not (checkpointer.directory / f"step-{step:09d}").exists():  # what is linked must be complete
                time.sleep(0.01)
        checkpointer.close()
        assert not checkpointer.failures

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(write, range(2)))
    reader = Checkpointer(tmp_path, worker=1, workers=2)
    for worker in range(2):
        assert len({frozen_file(reader, step, worker, 2).st_ino for step in (1, 2)}) == 1
    sizes = [frozen_file(reader, 1, worker, 2).st_size for worker in range(2)]
    assert (sizes[1] > 20_000) == divided
    assert values(reader, 2) == (1.0, 2.0)
    np.testing.assert_array_equal(reader.read(2).arrays["model/base"], np.ones([1000, 10]))
    np.testing.assert_array_equal(reader.read(2).arrays["model/head"], [2, 2, 2, -2, -2, -2])


def test_the_same_values_at_another_place_are_written_anew(tmp_path):
    """As other workers have them after a run was resumed on another mesh."""
    for step, axis in ((1, 0), (2, 1)):
        part = {"model/base": Part((1000, 1000), {axis: ((0, 1000),)})}
        arrays = {"model/base": np.zeros([1000, 1000], np.float32), "model/flag": np.array(True)}
        saved = dataclasses.replace(checkpoint(step), arrays=arrays, parts=part)
        checkpointer = written(tmp_path, saved)
    assert frozen_file(checkpointer, 1).st_ino != frozen_file(checkpointer, 2).st_ino


def test_weights_that_have_changed_are_written_anew(tmp_path):
    checkpointer = written(tmp_path, checkpoint(1), checkpoint(2, frozen=2.0), checkpoint(3, frozen=2.0))
    one, two, three = (frozen_file(checkpointer, step).st_ino for step in (1, 2, 3))
    assert one != two == three
    assert values(checkpointer, 1) == (1.0, 1.0)
    assert values(checkpointer, 3) == (2.0, 3.0)


def test_where_there_are_no_hard_links_it_is_written(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    checkpointer = written(tmp_path, checkpoint(1), checkpoint(2))
    assert frozen_file(checkpointer, 1).st_ino != frozen_file(checkpointer, 2).st_ino
    assert values(checkpointer, 2) == (1.0, 2.0)


def test_a_damaged_file_is_found_and_not_used_again(tmp_path):
    checkpointer = written(tmp_path, checkpoint(1))
    path = checkpointer.directory / "step-000000001" / FROZEN
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{FROZEN} does not match its checksum"):
        read(path.parent)
    again = written(tmp_path, checkpoint(2))
    assert frozen_file(again, 2).st_ino != path.stat().st_ino
    assert values(again, 2) == (1.0, 2.0)

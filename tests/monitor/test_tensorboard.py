"""Event files on a disk that becomes full; what they hold is in test_monitor.py."""

from __future__ import annotations

import pathlib

from tests.checkpoint import small_disk
from tfpar.monitor import tensorboard

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader


def points(directory: str) -> dict[str, list[int]]:
    """Steps of the points, by tag, over all event files that can be read."""
    found: dict[str, list[int]] = {}
    for path in sorted(pathlib.Path(directory).rglob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    return found


def test_a_full_disk_is_said_once_and_tried_again_later(tmp_path, monkeypatch, messages):
    with small_disk.mounted(tmp_path / "disk", kilobytes=256) as disk:
        files = tensorboard.EventFiles(str(disk), {"steps": 3})
        files.scalars("train", 1, {"loss": 1.0})
        files.flush()
        assert files.failures == []
        filler = small_disk.fill(disk)
        for step in range(2, 40):  # more than one writer's queue
            files.scalars("train", step, {"loss": 1.0})
            files.text("samples/a", "x" * 10_000, step)
            files.images("samples/b", np.zeros([2, 4, 4, 1], np.uint8), step)
            files.flush()
        files.end_session(success=True)
        files.close()
        assert messages == [
            "WARNING: TensorBoard events cannot be written (No space left on device); training continues without them"
        ]
        assert files.failures == ["TensorBoard events: No space left on device"]
        filler.unlink()
        files.scalars("train", 40, {"loss": 1.0})  # too early to try again
        monkeypatch.setattr(files, "_retry_at", 0.0)
        files.scalars("train", 41, {"loss": 1.0})
        files.close()
        # Names of files end in a number that counts over the process: 10 comes before 9.
        steps = sorted(points(files.directory)["loss"])
        assert steps[0] == 1
        assert steps[-1] == 41
        assert 40 not in steps
    assert len(messages) == 1

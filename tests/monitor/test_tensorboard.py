"""Event files on a disk that becomes full; what they hold is in test_monitor.py."""

from __future__ import annotations

import itertools
import pathlib

from tests import own_process
from tests.checkpoint import small_disk
from tfpar.monitor import tensorboard

import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

ROOT = pathlib.Path(__file__).resolve().parents[2]


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


def shown(workdir: pathlib.Path, run: str, tag: str = "loss") -> list[int]:
    """The steps of a chart, as TensorBoard shows it with `--load_fast=false`, or where it has no faster reader."""
    reader = EventAccumulator(str(workdir / run), size_guidance={"tensors": 0})
    reader.Reload()
    return [event.step for event in reader.Tensors(tag)] if tag in reader.Tags()["tensors"] else []


def test_readers_leave_out_the_points_that_a_resumed_run_makes_again(tmp_path):
    files = itertools.count()

    def start(after: int, last: int) -> None:
        events = tensorboard.EventFiles(str(tmp_path), {})
        events.begin(after)
        for step in range(after + 1, last + 1):
            events.scalars("train", step, {"loss": float(step)})
            if step % 2 == 0:
                events.scalars("eval", step, {"loss": float(step)})
            if step in (last - 1, last):  # the next point opens other files, of the same start
                events.close()
                for path in [*tmp_path.glob("*/events.*.v2")]:  # those of one second are not in the order of time
                    path.rename(path.with_name(f"events.out.tfevents.{next(files):010}"))

    start(0, 8)
    start(5, 10)
    assert shown(tmp_path, "train") == list(range(1, 11))
    assert shown(tmp_path, "eval") == [2, 4, 6, 8, 10]
    assert shown(tmp_path, "train", "configuration") != []
    start(10, 11)
    assert shown(tmp_path, "train") == list(range(1, 12))
    start(0, 2)  # a run that begins again: nothing of the old one is its own
    assert shown(tmp_path, "train") == [1, 2]
    assert shown(tmp_path, "eval") == [2]


RESUMED = """
import resource, sys
import tensorflow as tf
from tfpar.monitor import tensorboard

run, size = sys.argv[1], int(sys.argv[2])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
events = tensorboard.EventFiles(run, {})
events.begin(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
events.scalars("train", 2, {"loss": 1.0})
events.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(*events.failures)
events._retry_at = 0.0
events.scalars("train", 3, {"loss": 1.0})
events.close()
"""


def test_a_start_that_cannot_be_written_voids_the_points_later(tmp_path):
    """In a process of its own, whose files may have the size of one without events for a while."""
    events = tensorboard.EventFiles(str(tmp_path / "run"), {})
    events.begin(0)
    for step in (1, 2, 3):
        events.scalars("train", step, {"loss": 1.0})
    events.close()
    tf.summary.create_file_writer(str(tmp_path / "empty")).close()
    (empty,) = (tmp_path / "empty").iterdir()
    arguments = str(tmp_path / "run"), str(empty.stat().st_size)
    printed = own_process.printed(tmp_path, RESUMED, *arguments, PYTHONPATH=str(ROOT))
    assert printed.splitlines()[-1] == "TensorBoard events: File too large"
    assert shown(tmp_path / "run", "train") == [1, 3]


def test_files_that_no_start_has_begun_void_nothing(tmp_path):
    for step in (5, 3):
        events = tensorboard.EventFiles(str(tmp_path), {})
        events.scalars("train", step, {"loss": 1.0})
        events.close()
    assert sorted(shown(tmp_path, "train")) == [3, 5]

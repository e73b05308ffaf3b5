"""Whatever happens while a checkpoint is written: those before it stay, and somebody is told."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

from tests import nursery, permissions
from tests.checkpoint import small_disk
from tfpar.checkpoint import staging
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer, CheckpointError

import numpy as np
import pytest

pytestmark = pytest.mark.without_keras


KILLS = 50
KEEP = 2

# Writes checkpoints one after the other, two workers together, until it is killed. For each line that it reads, it
# starts a process that does so: what takes long, the imports, is done only once.
WRITER = """
import os, sys
import numpy as np
from tfpar.checkpoint.checkpointer import Checkpoint, Checkpointer

def checkpoint(step):
    arrays = {f"model/{n}": np.full(100, step, np.float32) for n in range(20)}
    arrays["model/large"] = np.full(1 << 19, step, np.float64)
    return Checkpoint(step, arrays, {"0/worker": np.full(1 << 10, step, np.float32)}, {"best": step}, {"seed": 1})

def write(workdir):
    workers = [Checkpointer(workdir, keep=int(sys.argv[1]), worker=worker, workers=2) for worker in (0, 1)]
    found = workers[0].latest()
    step = found.step if found else 0
    while True:
        step += 1
        for repeat in range(1 + step % 2):  # every other step is saved twice
            for worker in workers:
                worker.save(checkpoint(step), best=step % 5 == 0)
            for worker in workers:
                worker.wait()
            assert not workers[0].failures, workers[0].failures
            os.write(1, f"saved {step}\\n".encode())

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(line.strip())
    os.write(1, f"child {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def test_killed_at_any_moment_there_is_a_whole_checkpoint_and_none_is_lost(tmp_path, messages):
    generator = random.Random(0)
    interrupted = acknowledged = 0
    with nursery.Popen(
        [sys.executable, "-c", WRITER, str(KEEP)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        for _ in range(KILLS):
            writer.stdin.write(f"{tmp_path}\n")
            writer.stdin.flush()
            child, saved = None, 0
            patience = generator.randrange(4)  # checkpoints to see before it is killed, some time into the next
            while child is None or saved < patience:
                kind, number = writer.stdout.readline().split()
                child = int(number) if kind == "child" else child
                saved += kind == "saved"
                acknowledged = int(number) if kind == "saved" else acknowledged
            time.sleep(generator.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)
            while (line := writer.stdout.readline().strip()) != "dead":
                acknowledged = int(line.removeprefix("saved "))
            interrupted += any((tmp_path / "checkpoints").glob(".step-*"))
            # A child may be killed between a checkpoint and its word: the next goes on from there all the same.
            acknowledged = check_what_is_left(tmp_path, acknowledged, messages)
        writer.stdin.close()
    assert acknowledged > KILLS / 2
    assert interrupted > KILLS / 2  # in the midst of writing, not between two writes


def check_what_is_left(workdir: pathlib.Path, acknowledged: int, messages: list[str]) -> int:
    """Checks all that is there; returns the newest step."""
    reader = Checkpointer(workdir, worker=0, workers=2)  # tidies up
    newest = reader.latest()
    assert not messages
    if acknowledged:
        assert newest.step in (acknowledged, acknowledged + 1)
    steps = reader.steps()
    # Also those before: what was acknowledged is kept until enough newer ones are whole.
    assert set(range(max(1, newest.step - KEEP + 1), newest.step + 1)) <= set(steps) if newest else not steps
    for step in steps:
        loaded = reader.read(step)
        assert all((array == step).all() for array in [*loaded.arrays.values(), *loaded.exchange.values()])
        assert (reader.exchange_state(step, 1)["0/worker"] == step).all()
    assert {path.name for path in reader.directory.glob(".*")} <= {".best.json"}
    reader.close()
    return newest.step if newest else 0


def checkpoint(step: int, kilobytes: int = 1, exchange_kilobytes: int = 0) -> Checkpoint:
    exchange = {"0/worker": np.full(exchange_kilobytes << 8, step, np.float32)} if exchange_kilobytes else {}
    return Checkpoint(step, {"model/kernel": np.full(kilobytes << 8, step, np.float32)}, exchange, {}, {})


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_is_survived(tmp_path, monkeypatch, foreseen, messages):
    if not foreseen:  # as with a quota, of which the file system's free space says nothing
        monkeypatch.setattr(staging, "_check_space", lambda *arguments: None)
    with small_disk.mounted(tmp_path / "disk", kilobytes=512) as disk:
        writer = Checkpointer(disk, keep=1)
        writer.save(checkpoint(1), best=True)
        writer.save(checkpoint(2, kilobytes=600), best=True)
        writer.wait()
        assert writer.steps() == [1]
        assert len(messages) == 1
        assert re.match(r"WARNING: checkpoint of step 2 could not be written \(.*No space left on device", messages[0])
        assert messages[0].endswith("training continues. Checkpoints: the newest is of step 1")
        assert re.match("step 2: .*No space left on device", writer.failures[0])
        assert (writer.latest().arrays["model/kernel"] == 1).all()
        assert not list(writer.directory.glob(".step-*"))  # what was written of it takes no room
        filler = small_disk.fill(disk)
        writer.save(checkpoint(3))
        writer.wait()
        assert len(writer.failures) == 2
        assert writer.steps() == [1]
        filler.unlink()
        writer.save(checkpoint(4), best=True)
        writer.close()
        assert writer.steps() == [4]
        assert len(writer.failures) == 2


def test_a_best_that_cannot_be_noted_is_kept(tmp_path, messages):
    writer = Checkpointer(tmp_path, keep=1)
    writer.save(checkpoint(1), best=True)
    writer.wait()
    (writer.directory / ".best.json").mkdir()  # in the way of the new note
    writer.save(checkpoint(2), best=True)
    writer.save(checkpoint(3))
    writer.close()
    assert writer.steps() == [1, 2, 3]  # the one that the note names, and the one that it should
    assert writer.failures == ["best.json of step 2: .best.json: Is a directory"]
    assert len(messages) == 1
    assert messages[0].startswith("WARNING: best.json (step 2 is the best) could not be written (.best.json: Is a dir")


@pytest.mark.parametrize("when", ["next save", "close", "mark_best"])
def test_fail_ends_the_run_and_keeps_the_older_ones(tmp_path, when):
    writer = Checkpointer(tmp_path, on_error="fail")
    writer.save(checkpoint(1))
    writer.wait()
    (writer.directory / ".step-000000002.partial").write_text("a file where the directory should be")
    writer.save(checkpoint(2))
    call = {
        "next save": lambda: writer.save(checkpoint(3)),
        "close": writer.close,
        "mark_best": lambda: writer.mark_best(2),
    }
    with pytest.raises(CheckpointError, match=r"step 2 .*File exists.*--on_checkpoint_error=fail.*are untouched"):
        call[when]()
    writer.close()
    assert writer.steps() == [1]


def save_together(writers: list[Checkpointer], checkpoints: list[Checkpoint]) -> None:
    threads = [
        threading.Thread(target=writer.save, args=(mine,)) for writer, mine in zip(writers, checkpoints, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.wait()


def test_worker_0_hears_of_a_peer_that_could_not_write(tmp_path, messages):
    with small_disk.mounted(tmp_path / "disk", kilobytes=512) as disk:
        writers = [Checkpointer(disk, worker=worker, workers=2) for worker in (0, 1)]
        save_together(writers, [checkpoint(1, 1, 1), checkpoint(1, 1, 1)])
        save_together(writers, [checkpoint(2, 1, 1), checkpoint(2, 1, 600)])
        assert [len(writer.failures) for writer in writers] == [1, 1]
        assert "worker 1 could not write its exchange state: No space left on device" in writers[0].failures[0]
        assert writers[0].steps() == [1]
        save_together(writers, [checkpoint(3, 1, 1), checkpoint(3, 1, 1)])
        assert writers[0].steps() == [1, 3]
        for writer in writers:
            writer.close()
        assert not list(writers[0].directory.glob(".*"))


def test_what_is_left_of_a_failed_attempt_does_not_spoil_the_next(tmp_path, monkeypatch, messages):
    """After worker 0 has given up waiting for it, worker 1 still writes its file, and worker 2 fails to."""

    def refuse(*_: object, **options: str) -> None:
        raise OSError(28, "No space left on device")

    writers = [Checkpointer(tmp_path, worker=worker, workers=3) for worker in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(staging, "_PEER_WAIT_SECONDS", 0.1)
        for writer in writers:
            if writer.worker == 2:
                patched.setattr(staging, "write_arrays", refuse)
            writer.save(checkpoint(1, 1, exchange_kilobytes=1))
            writer.wait()
    left = {path.name for path in (writers[0].directory / ".step-000000001.partial").iterdir()}
    assert left == {"exchange-1.safetensors", "exchange-2.safetensors.failed"}
    save_together(writers, [checkpoint(1, 1, exchange_kilobytes=2)] * 3)
    for writer in writers:
        writer.close()
    assert [len(writer.failures) for writer in writers] == [1, 0, 1]
    assert [writers[0].exchange_state(1, worker)["0/worker"].nbytes for worker in range(3)] == [2048] * 3
    assert not list(writers[0].directory.glob(".*"))


def test_nobody_waits_for_peers_of_a_run_that_has_ended(tmp_path, messages):
    writer = Checkpointer(tmp_path, worker=0, workers=2)
    writer.save(checkpoint(1, 1, 1))  # worker 1 has died
    writer.abandon()
    assert "the run ended before exchange-1.safetensors appeared" in writer.failures[0]
    assert writer.steps() == []
    assert not list(writer.directory.glob(".*"))


def test_a_peer_whose_file_never_comes_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_PEER_WAIT_SECONDS", 0.2)
    writer = Checkpointer(tmp_path, worker=0, workers=3)
    writer.save(checkpoint(1, 1, 1))
    writer.close()
    assert "exchange-1.safetensors, exchange-2.safetensors did not appear within 0 s" in writer.failures[0]


def test_a_peer_that_still_writes_is_waited_for(tmp_path, monkeypatch):
    """Its file is larger, or its storage slower, than what worker 0 has written."""
    monkeypatch.setattr(staging, "_PEER_WAIT_SECONDS", 0.5)
    write_arrays = staging.write_arrays

    def write_slowly(path: pathlib.Path, *arguments, **options) -> None:
        if path.name.startswith("exchange-1"):
            for number in range(10):
                time.sleep(0.15)
                with open(path.with_name(".in_progress"), "ab") as file:
                    file.write(bytes(number))
            os.unlink(path.with_name(".in_progress"))
        write_arrays(path, *arguments, **options)

    monkeypatch.setattr(staging, "write_arrays", write_slowly)
    writers = [Checkpointer(tmp_path, worker=worker, workers=2) for worker in range(2)]
    save_together(writers, [checkpoint(1, 1, exchange_kilobytes=1)] * 2)
    for writer in writers:
        writer.close()
    assert [writer.failures for writer in writers] == [[], []]
    assert writers[0].steps() == [1]


def test_everything_reaches_the_disk_before_the_name_does(tmp_path, monkeypatch):
    """The order of flushes and of the rename, as a file system that loses its power would see it."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(str(path.relative_to(tmp_path)))
        fsync(descriptor)

    def noted_rename(source, target) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    with contextlib.closing(Checkpointer(tmp_path)) as writer:
        writer.save(checkpoint(1))
    partial = "checkpoints/.step-000000001.partial"
    files = [f"{partial}/state.safetensors.new", f"{partial}/manifest.json"]
    assert events == [*files, partial, "rename", "checkpoints", "."]


def test_a_name_that_cannot_be_flushed_is_a_warning_because_the_checkpoint_is_there(tmp_path, monkeypatch, messages):
    fsync = os.fsync

    def of_files_alone(descriptor: int) -> None:
        if pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path / "checkpoints":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    writer = Checkpointer(tmp_path, keep=1, on_error="fail")
    for step in (1, 2):
        writer.save(checkpoint(step))
    writer.wait()
    monkeypatch.setattr(os, "fsync", of_files_alone)
    writer.save(checkpoint(2, kilobytes=2), best=True)
    writer.close()
    assert writer.failures == []
    assert sorted(path.name for path in writer.directory.iterdir()) == ["best.json", "step-000000002"]
    assert writer.latest().arrays["model/kernel"].nbytes == 2048
    said = f"is written, but {tmp_path}/checkpoints cannot be flushed (Input/output error): a power failure within"
    assert [message.split(" the next")[0] for message in messages] == [
        f"WARNING: step-000000002 {said}",
        f"WARNING: best.json {said}",
    ]


def test_a_directory_that_can_no_longer_be_listed_does_not_end_a_run(tmp_path, messages):
    with contextlib.closing(Checkpointer(tmp_path)) as earlier:
        earlier.save(checkpoint(1))
    writer = Checkpointer(tmp_path, keep=1)
    with permissions.of(writer.directory, 0o311):  # before the thread that writes starts
        writer.save(checkpoint(2), best=True)
        writer.wait()
        assert writer.failures == []
        assert "older checkpoints stay: the checkpoints in" in messages[-1]
        (writer.directory / ".step-000000003.partial").write_text("a file where the directory should be")
        writer.save(checkpoint(3))
        writer.close()
    assert messages[-1].endswith("Checkpoints: they cannot be listed")
    assert writer.steps() == [1, 2]

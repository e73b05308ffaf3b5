"""A disk that becomes full, or read-only, while a real run is training."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from tests import nursery
from tests.checkpoint import small_disk
from tests.integration.test_multi_worker import ROOT, launch
from tfpar.checkpoint import checkpointer

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]
STEPS = 3000
FLAGS = [
    *("--dataset=digits", "--model=mlp", "--optimizer=sgd", f"--steps={STEPS}", "--eval_every=1500"),
    *("--checkpoint_every=100", "--keep_checkpoints=100", "--jit_compile=false", "--steps_per_loop=10"),
    "--log_every=10",
]


def train(output: pathlib.Path, workdir: pathlib.Path, spoil, *flags: str) -> tuple[int, str]:
    """Trains; once there is a checkpoint, stops the time for `spoil`, and calls it ever again. Exit code and output."""
    environ = {key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")}
    command = [sys.executable, "experiments/image_classification.py", *FLAGS, f"--workdir={workdir}", *flags]
    with (
        open(output, "wb") as file,
        nursery.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while not any((workdir / "checkpoints").glob("step-*")):
                assert process.poll() is None, output.read_text()
                time.sleep(0.002)
            process.send_signal(signal.SIGSTOP)
            spoil()
            process.send_signal(signal.SIGCONT)
            while process.poll() is None:
                time.sleep(0.005)
                spoil()
        finally:
            process.kill()
    return process.returncode, output.read_text()


def whole(workdir: pathlib.Path) -> list[int]:
    """The checkpoints, each of which can be read."""
    reader = checkpointer.Checkpointer(workdir, worker=1)  # worker 0 would tidy up
    steps = reader.steps()
    assert [reader.read(step).step for step in steps] == steps
    return steps


def test_a_run_on_a_disk_that_becomes_full_ends_well_and_says_so(tmp_path):
    with small_disk.mounted(tmp_path / "disk", kilobytes=4096) as disk:
        before: list[int] = []

        def spoil() -> None:
            if not before:
                before.extend(whole(disk))
            small_disk.fill(disk)  # what a checkpoint that was not finished gives back, too

        code, output = train(tmp_path / "output", disk, spoil)
        assert code == 0, output
        assert before
        assert whole(disk) == before
        assert "could not be written" in output
        assert "No space left on device" in output
        assert "training continues. Checkpoints: the newest is of step" in output
        assert "TensorBoard events cannot be written" in output
        table = output[output.index("\nresult\n") :]
        assert f"steps                {STEPS}" in table
        assert "eval accuracy" in table
        failed = (STEPS - before[-1]) // 100
        row = table[table.index("failed checkpoints") :].splitlines()[0]
        assert row.startswith(f"failed checkpoints   step {before[-1] + 100}: No space left on device")
        assert f"; and {failed - 1} more, last step {STEPS}: " in row
        for name in ("TensorBoard events", "model.keras", "summary.json"):
            assert name in table[table.index("failed to write") :].splitlines()[0], name
        content = json.loads(output.partition("what summary.json would hold: ")[2].splitlines()[0])
        assert content["steps"] == STEPS
        assert len(content["failed_checkpoints"]) == failed
        assert not (disk / "summary.json").exists()
        assert not (disk / "model.keras").exists()
        # Room again: the run goes on from the last checkpoint that was whole.
        (disk / "filler").unlink()
        for step in before[:-1]:
            checkpointer.staging.remove(disk / "checkpoints" / f"step-{step:09d}")
        result = launch(1, "experiments/image_classification.py", *FLAGS, "--keep_checkpoints=1", f"--workdir={disk}")
        assert result.returncode == 0, result.stdout
        assert f"resumed from step {before[-1]} " in result.stdout
        assert json.loads((disk / "summary.json").read_text())["failed_checkpoints"] == []


def test_fail_ends_the_run_on_a_full_disk(tmp_path):
    with small_disk.mounted(tmp_path / "disk", kilobytes=4096) as disk:
        code, output = train(tmp_path / "output", disk, lambda: small_disk.fill(disk), "--on_checkpoint_error=fail")
        assert code == 1, output
        assert "error: the checkpoint of step" in output.splitlines()[-1]
        assert "Traceback" not in output
        assert "--on_checkpoint_error=fail" in output.splitlines()[-1]
        assert whole(disk)


def test_a_run_in_a_directory_that_becomes_read_only_ends_well_and_says_so(tmp_path):
    with small_disk.mounted(tmp_path / "disk", kilobytes=65536) as disk:
        code, output = train(tmp_path / "output", disk, lambda: small_disk.make_read_only(disk))
        assert code == 0, output
        table = output[output.index("\nresult\n") :]
        assert "Read-only file system" in table[table.index("failed checkpoints") :].splitlines()[0]
        assert "model.keras" in table[table.index("failed to write") :].splitlines()[0]
        assert "what summary.json would hold: " in output
        assert whole(disk)

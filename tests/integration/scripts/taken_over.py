"""What a run that is killed leaves, without a run of its own."""

from __future__ import annotations

import pathlib
import shutil
import time

from tfpar.checkpoint import format as checkpoint_format


def take_over(workdir: str, step: int, of: str, worker: int) -> None:
    """Gives a new run the checkpoint that another, which went on, has written after `step`.

    Args:
      workdir: Of the new run, whose workers all call this.
      step: Steps that were done.
      of: The other run's `workdir`.
      worker: The rank of this worker; the first copies, and the others wait.
    """
    name = checkpoint_format.directory_name(step)
    copy = pathlib.Path(workdir, "checkpoints", name)
    if worker == 0:
        shutil.copytree(pathlib.Path(of, "checkpoints", name), copy.with_name("copying"))
        copy.with_name("copying").rename(copy)
    deadline = time.monotonic() + 60.0
    while not copy.exists():
        assert time.monotonic() < deadline, f"worker 0 has not copied {name}"
        time.sleep(0.02)

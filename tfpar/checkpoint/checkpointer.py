"""Checkpoints: the complete state of a run, written in the background during training, atomically.

```
WORKDIR/checkpoints/
  step-000000600/            one checkpoint, see `tfpar.checkpoint.format`
  best.json                  which checkpoint had the best evaluation, sealed by its SHA-256
  step-000000400.damaged/    found damaged when the run was resumed; set aside, never read again
```

A checkpoint is written into a hidden directory, flushed to the disk and renamed, so a directory with its final name is
always complete. Older ones are untouched until then; only those beyond `keep` are removed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import errno
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfpar.checkpoint import format as files
from tfpar.checkpoint import staging
from tfpar.checkpoint.arrays import SavedArrays
from tfpar.checkpoint.format import FORMAT, Checkpoint, CheckpointError, read
from tfpar.checkpoint.staging import reason
from tfpar.process.whole_files import flush_names, replace_file

import numpy as np

__all__ = ["FORMAT", "Checkpoint", "CheckpointError", "Checkpointer", "find", "read"]

_log = logging.getLogger(__name__)

_BEST = "best.json"
# The file is missing, or the disk cannot read it. After other errors it may be intact, and readable later.
_OF_DAMAGE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, None})


class Checkpointer:
    """Writes checkpoints in the background and finds the one to resume from.

    A checkpoint that cannot be written, for whatever reason, is noted in `failures` and leaves older checkpoints
    untouched; worker 0 logs a warning.

    Args:
      workdir: Directory of the run. Worker 0 removes the remains of interrupted writes from it.
      keep: Number of newest checkpoints to keep, in addition to the best one.
      worker: Rank of this worker. Worker 0 writes the variables, which are equal everywhere, unless several workers
        hold parts of them (`Checkpoint.state_files`); every worker writes its exchange state.
      workers: Number of workers; all see the same `workdir`.
      on_error: `warn`, or `fail`: then the call after a failed write raises `CheckpointError`.
      needed: See `format.read`.

    Raises:
      CheckpointError: The directory of the checkpoints cannot be listed.

    Attributes:
      failures: Checkpoints that could not be written, and why, one line each.
      damaged: Steps of the checkpoints that `latest` found damaged, and why.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        keep: int = 3,
        worker: int = 0,
        workers: int = 1,
        on_error: str = "warn",
        needed: Callable[[SavedArrays], Collection[str]] | None = None,
    ) -> None:
        self.directory = pathlib.Path(workdir) / "checkpoints"
        self.worker = worker
        self.failures: list[str] = []
        self.damaged: dict[int, str] = {}
        self._keep = keep
        self._workers = workers
        self._on_error = on_error
        self._needed = needed
        self._candidate: int | None = None
        self._attempts: collections.Counter[int] = collections.Counter()
        self._pending: concurrent.futures.Future[None] | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._abandoned = threading.Event()
        self._spared: set[int] = set()
        if worker == 0:
            staging.tidy(self.directory)
            if isinstance(_best_step(self.directory), OSError | ValueError):  # the best is unknown: none may be removed
                self._spared = set(self.steps())

    def save(self, checkpoint: Checkpoint, *, best: bool = False, candidate: bool = False) -> None:
        """Starts writing a checkpoint; returns as soon as the previous one is on disk.

        The arrays must not change afterwards (they are copies of the variables).

        Args:
          checkpoint: The checkpoint.
          best: Whether this is the best evaluation so far.
          candidate: Whether its evaluation is still running: it is kept until the next candidate is saved, so that
            `mark_best` finds it.

        Raises:
          CheckpointError: The previous one could not be written, and `on_error` is `fail`.
        """
        self.wait()
        if candidate:
            self._candidate = checkpoint.step
        self._attempts[checkpoint.step] += 1
        attempt = self._attempts[checkpoint.step]
        self._pending = self._executor.submit(self._write_guarded, checkpoint, best, attempt)

    def mark_best(self, step: int) -> None:
        """Marks a checkpoint as the best; does nothing if it could not be written."""
        self.wait()
        if (self.directory / files.directory_name(step)).is_dir():
            self._write_best(step)

    def wait(self) -> None:
        """Returns when the last `save` is on disk; raises as `save` does."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Finishes writing and ends the writer thread; raises as `save` does."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def abandon(self) -> None:
        """Ends the writer thread without waiting for peers, which may have ended; may be called twice."""
        self._abandoned.set()
        self._executor.shutdown()

    def warn(self, text: str) -> None:
        """Logs a warning in worker 0, and nothing in the others, which would repeat it."""
        if self.worker == 0:
            _log.warning("%s", text)

    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, oldest first; raises as `format.names_in` does."""
        return files.steps_in(self.directory)

    def read(self, step: int) -> Checkpoint:
        """The checkpoint of a step, with this worker's exchange state; raises as `format.read` does."""
        directory = self.directory / files.directory_name(step)
        return read(directory, worker=self.worker, workers=self._workers, needed=self._needed)

    def latest(self, *, below: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that passes its checksums, or None.

        Worker 0 warns of a damaged one; then the previous one is used.

        Args:
          below: Looks only at checkpoints of steps below this one.

        Raises:
          CheckpointError: The file system cannot list the checkpoints, or read one, whose content may be intact; or one
            is of another version (`UnknownFormatError`).
        """
        for step in reversed(self.steps()):
            if below is not None and step >= below:
                continue
            try:
                return self.read(step)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno not in _OF_DAMAGE:
                    raise CheckpointError(
                        f"the checkpoint of step {step} in {self.directory} cannot be read ({reason(error)}). It may "
                        "be whole, so no earlier one is used. Start again once it can be read, or move it away."
                    ) from error
                self.damaged[step] = reason(error)
                self.warn(f"checkpoint of step {step} is damaged ({reason(error)}); trying the one before it")
        return None

    def set_aside(self, after: int) -> None:
        """Renames the checkpoints of later steps, found damaged, so that they no longer count as the newest.

        Worker 0 does it. Nothing is deleted: one that was set aside earlier stays, too.

        Args:
          after: The step that the run resumes from.
        """
        if self.worker != 0:
            return
        for step in self.steps():
            if step <= after:
                continue
            path = self.directory / files.directory_name(step)
            aside, number = path.with_name(f"{path.name}.damaged"), 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}.damaged-{number}")
            try:
                os.rename(path, aside)
                self.warn(f"the damaged checkpoint of step {step} is kept as {aside}")
            except OSError as error:
                self.warn(f"the damaged checkpoint of step {step} cannot be renamed: {reason(error)}")

    def exchange_state(self, step: int, worker: int) -> Mapping[str, np.ndarray]:
        """The exchange state that a worker saved at a step, empty if it had none; ValueError if it is damaged."""
        return files.read_exchange(self.directory / files.directory_name(step), worker)

    def _write_guarded(self, checkpoint: Checkpoint, best: bool, attempt: int) -> None:
        try:
            staging.write(self.directory, checkpoint, self.worker, self._workers, self._abandoned, attempt)
        except Exception as error:  # any error: training can continue without this checkpoint
            self._failed(f"step {checkpoint.step}", f"checkpoint of step {checkpoint.step}", error)
            return
        if self.worker == 0:
            if best:
                self._write_best(checkpoint.step)
            self._remove_old(checkpoint.step)

    def _failed(self, short: str, what: str, error: Exception) -> None:
        why = reason(error)
        self.failures.append(f"{short}: {why}")
        if self._on_error == "fail":
            raise CheckpointError(
                f"the {what} could not be written ({why}), and --on_checkpoint_error=fail makes that an error. Older "
                f"checkpoints in {self.directory} are untouched; make room there, or use --on_checkpoint_error=warn."
            ) from error
        try:
            newest = max(self.steps(), default=None)
            state = "there is none yet" if newest is None else f"the newest is of step {newest}"
        except CheckpointError:
            state = "they cannot be listed"
        self.warn(f"{what} could not be written ({why}); training continues. Checkpoints: {state}")

    def _write_best(self, step: int) -> None:
        try:
            replace_file(self.directory / _BEST, files.seal({"step": step}))
            flush_names(_BEST, self.directory)
            self._spared = set()
        except OSError as error:
            # The file still names the previous best, which therefore stays. This one must stay too, for this run.
            self._spared = {*self._spared, step}
            self._failed(f"{_BEST} of step {step}", f"{_BEST} (step {step} is the best)", error)

    def _remove_old(self, written: int) -> None:
        best = _best_step(self.directory)
        kept = {written, self._candidate, best if isinstance(best, int) else None, *self._spared}
        try:
            steps = self.steps()
        except CheckpointError as error:  # the new one is written: more of them than needed are no reason to end a run
            self.warn(f"older checkpoints stay: {error}")
            return
        for step in steps[: -self._keep]:
            if step not in kept:
                staging.remove(self.directory / files.directory_name(step))


def find(workdir: str | os.PathLike[str], *, warn: Callable[[str], None] = _log.warning) -> Checkpoint | None:
    """The best checkpoint of a run if one was marked, otherwise the newest; None if there is none. Only reads.

    Args:
      workdir: Directory of the run.
      warn: Called with one line if that checkpoint is damaged and another is used.

    Raises:
      CheckpointError: The checkpoints cannot be listed, or one is of another version.
      ValueError: There are checkpoints, and all are damaged.
    """
    directory = pathlib.Path(workdir) / "checkpoints"
    steps = files.steps_in(directory)
    best = _best_step(directory)
    if isinstance(best, OSError | ValueError):
        warn(f"{directory / _BEST} is damaged ({reason(best)}): using the newest checkpoint instead of the best")
    elif best is not None:
        if best not in steps:
            warn(f"the best checkpoint, of step {best}, is missing in {directory}: using the newest")
        steps = [*(step for step in steps if step != best), *([best] if best in steps else [])]
    damage = []
    for step in reversed(steps):
        try:
            return read(directory / files.directory_name(step))
        except (OSError, ValueError) as error:
            damage.append(f"step {step}: {reason(error)}")
            warn(f"checkpoint of step {step} in {directory} is damaged ({reason(error)}); trying another")
    if damage:
        raise ValueError(f"every checkpoint in {directory} is damaged: {'; '.join(damage)}")
    return None


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the directory of one checkpoint."""
    # `Path.is_file` raises an error within a directory that may not be searched (Python 3.11).
    return os.path.isfile(os.path.join(path, files.MANIFEST))


def has_any(workdir: str | os.PathLike[str]) -> bool:
    """Whether a workdir holds a checkpoint; raises as `format.names_in` does."""
    return bool(files.steps_in(pathlib.Path(workdir) / "checkpoints"))


def saved_config(workdir: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """The configuration in the newest checkpoint of a workdir, or None if there is none.

    Raises:
      CheckpointError: The checkpoints cannot be listed, or one is of another version.
    """
    directory = pathlib.Path(workdir) / "checkpoints"
    for step in reversed(files.steps_in(directory)):
        try:
            return files.read_manifest(directory / files.directory_name(step))["config"]
        except (OSError, ValueError):
            continue
    return None


def _best_step(directory: pathlib.Path) -> int | OSError | ValueError | None:
    """The best step; None if none was marked; the error if the file cannot be read."""
    try:
        step = files.unseal(directory / _BEST).get("step")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return error
    return step if type(step) is int else ValueError("it names no step")

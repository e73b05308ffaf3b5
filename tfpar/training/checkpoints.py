"""Checkpoints: everything that defines a run, written beside the training, whole or not at all.

Format, one directory per checkpoint:

```
WORKDIR/checkpoints/
  step-000000600/
    manifest.json          format version, step, run state, configuration, size and SHA-256 of every other file,
                         sealed by its own SHA-256
    state.safetensors      variables of model and optimizer, by path
    exchange-0.safetensors exchange state (residuals) of worker 0; only where the exchange has any
  best.json                which checkpoint had the best evaluation
```

A checkpoint is written into a hidden directory, flushed to the disk and renamed, so a directory of that name is
always whole. safetensors files hold a JSON header and raw bytes: nothing in a checkpoint is executed when it is read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfpar.config import ConfigError

import numpy as np
import safetensors.numpy

FORMAT = 2
_PREFIX = "step-"
_STATE = "state.safetensors"
_MANIFEST = "manifest.json"
_PEER_WAIT_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
      step: Updates done.
      arrays: `model/PATH` and `optimizer/PATH` -> value.
      exchange: Exchange state of the reading worker, by name.
      run: Everything else that defines the run, JSON-able: seeds, input position, loss scale, plateau, best value.
      config: The configuration, by flag name.
    """

    step: int
    arrays: Mapping[str, np.ndarray]
    exchange: Mapping[str, np.ndarray]
    run: Mapping[str, Any]
    config: Mapping[str, Any]


class Checkpointer:
    """Writes checkpoints in the background and finds the one to resume from.

    Args:
      workdir: Directory of the run.
      keep: Newest checkpoints that stay; the best one stays besides.
      worker: Rank of this worker. Worker 0 writes the variables, the same everywhere; every worker its exchange state.
      workers: Number of workers; all see the same `workdir`.
      warn: Called with one line when something went wrong that does not end the run.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        keep: int = 3,
        worker: int = 0,
        workers: int = 1,
        warn: Callable[[str], None] = print,
    ) -> None:
        self.directory = pathlib.Path(workdir) / "checkpoints"
        self.failures: list[str] = []
        self._keep = keep
        self._worker = worker
        self._workers = workers
        self._warn = warn
        self._candidate: int | None = None
        self._pending: concurrent.futures.Future[None] | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if worker == 0:  # what an interrupted write left behind
            for leftover in self.directory.glob(f".{_PREFIX}*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, checkpoint: Checkpoint, *, best: bool = False, candidate: bool = False) -> None:
        """Starts writing a checkpoint; returns as soon as the one before it is on disk.

        The arrays must not change afterwards (they are copies of the variables). A failed write is reported through
        `warn`, kept in `failures`, and leaves older checkpoints untouched.

        Args:
          checkpoint: What to write.
          best: Whether this is the best evaluation so far.
          candidate: Whether its evaluation is still under way: it stays until the next candidate is saved, so that
            `mark_best` finds it.
        """
        self.wait()
        if candidate:
            self._candidate = checkpoint.step
        self._pending = self._executor.submit(self._write_guarded, checkpoint, best)

    def mark_best(self, step: int) -> None:
        """Notes that a checkpoint turned out to be the best; nothing if it could not be written."""
        self.wait()
        if (self.directory / _name(step)).is_dir():
            self._write_best(step)

    def wait(self) -> None:
        """Returns when the last `save` is on disk."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Finishes writing and ends the writer thread."""
        self.wait()
        self._executor.shutdown()

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest first."""
        return _steps(self.directory)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that passes its checksums, or None where there is none.

        One that is damaged is reported through `warn` and the one before it is taken.
        """
        for step in reversed(self.steps()):
            try:
                return read(self.directory / _name(step), worker=self._worker)
            except (OSError, ValueError) as error:
                self._warn(f"checkpoint of step {step} is damaged ({error}); trying the one before it")
        return None

    def exchange_state(self, step: int, worker: int) -> Mapping[str, np.ndarray]:
        """The exchange state that a worker saved at a step, empty if it had none; ValueError if it is damaged."""
        return read(self.directory / _name(step), worker=worker).exchange

    def _write_guarded(self, checkpoint: Checkpoint, best: bool) -> None:
        try:
            self._write(checkpoint, best)
        except OSError as error:
            self.failures.append(f"step {checkpoint.step}: {error}")
            self._warn(f"checkpoint of step {checkpoint.step} could not be written ({error}); training goes on")

    def _write(self, checkpoint: Checkpoint, best: bool) -> None:
        target = self.directory / _name(checkpoint.step)
        staging = self.directory / f".{target.name}.partial"
        staging.mkdir(parents=True, exist_ok=True)
        if checkpoint.exchange:
            name = _exchange_name(self._worker)
            _write_arrays(staging / f"{name}.new", checkpoint.exchange)
            os.replace(staging / f"{name}.new", staging / name)
        if self._worker != 0:
            return
        try:
            files = [_STATE]
            _write_arrays(staging / _STATE, checkpoint.arrays)
            if checkpoint.exchange:
                files += [_exchange_name(worker) for worker in range(self._workers)]
                _wait_for([staging / name for name in files])
            manifest = {
                "format": FORMAT,
                "step": checkpoint.step,
                "workers": self._workers,
                "run": dict(checkpoint.run),
                "config": dict(checkpoint.config),
                "files": {name: _fingerprint(staging / name) for name in files},
            }
            _write_file(staging / _MANIFEST, _seal(manifest))
            if target.exists():  # the same step once more, e.g. after a restart from an older one
                shutil.rmtree(target)
            os.rename(staging, target)
            _sync_directory(self.directory)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        if best:
            self._write_best(checkpoint.step)
        self._remove_old()

    def _write_best(self, step: int) -> None:
        _write_file(self.directory / ".best.json", json.dumps({"step": step}).encode())
        os.replace(self.directory / ".best.json", self.directory / "best.json")

    def _remove_old(self) -> None:
        kept = (_best_step(self.directory), self._candidate)
        for step in self.steps()[: -self._keep]:
            if step not in kept:
                shutil.rmtree(self.directory / _name(step), ignore_errors=True)


def find(workdir: str | os.PathLike[str], *, worker: int = 0) -> Checkpoint | None:
    """The best checkpoint of a run where one was marked, else its newest; None where there is none. Reads only."""
    directory = pathlib.Path(workdir) / "checkpoints"
    step = _best_step(directory)
    if step is None:
        step = max(_steps(directory), default=None)
    return None if step is None else read(directory / _name(step), worker=worker)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the directory of one checkpoint."""
    return (pathlib.Path(path) / _MANIFEST).is_file()


def has_any(workdir: str | os.PathLike[str]) -> bool:
    """Whether a workdir holds a checkpoint."""
    return bool(_steps(pathlib.Path(workdir) / "checkpoints"))


def saved_config(workdir: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """The configuration in the newest checkpoint of a workdir, or None where there is none."""
    directory = pathlib.Path(workdir) / "checkpoints"
    for step in reversed(_steps(directory)):
        try:
            return _manifest(directory / _name(step))["config"]
        except (OSError, ValueError):
            continue
    return None


def read(path: str | os.PathLike[str], *, worker: int = 0) -> Checkpoint:
    """Reads one checkpoint directory and verifies its checksums.

    Args:
      path: Directory of the checkpoint.
      worker: Whose exchange state to read.

    Raises:
      ValueError: A file that is missing, truncated or changed, or a format of another version.
    """
    path = pathlib.Path(path)
    manifest = _manifest(path)
    contents = {}
    own = (_STATE, _exchange_name(worker))
    for name, expected in manifest["files"].items():
        if name not in own:
            continue
        if _fingerprint(path / name) != expected:
            raise ValueError(f"{name} does not match its checksum")
        contents[name] = safetensors.numpy.load_file(path / name)
    return Checkpoint(
        step=int(manifest["step"]),
        arrays=contents[_STATE],
        exchange=contents.get(_exchange_name(worker), {}),
        run=manifest["run"],
        config=manifest["config"],
    )


def _seal(manifest: Mapping[str, Any]) -> bytes:
    """The manifest with its own checksum as a last line, so that it can be read and still cannot change unnoticed."""
    text = json.dumps(manifest, indent=1) + "\n"
    return (text + hashlib.sha256(text.encode()).hexdigest() + "\n").encode()


def _manifest(path: pathlib.Path) -> dict[str, Any]:
    text, _, seal = (path / _MANIFEST).read_text().rstrip("\n").rpartition("\n")
    text += "\n"
    if hashlib.sha256(text.encode()).hexdigest() != seal:
        raise ValueError(f"{_MANIFEST} does not match its checksum")
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ValueError(f"{path} has checkpoint format {manifest['format']!r}; this version reads {FORMAT}")
    return manifest


# Options that may differ between a run and its continuation: they change where, how fast and how visibly it runs,
# or how long, but not what is being trained.
MAY_DIFFER = frozenset(
    {
        *("strategy", "devices", "tpu", "exchange", "uneven_batches"),
        *("workdir", "checkpoint_every", "keep_checkpoints", "warm_start"),
        *("log_every", "profile_steps", "verbose", "eval_every"),
        *("data_dir", "cache", "prefetch", "input_threads", "data_service", "on_bad_record", "max_bad_steps"),
        *("jit_compile", "tf32", "deterministic", "steps_per_loop", "steps", "epochs", "stop_after"),
    }
)


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], workdir: str) -> None:
    """Refuses to continue a run under another configuration.

    Args:
      saved: Configuration in the checkpoint, by flag name.
      current: Configuration of this start.
      workdir: For the message.

    Raises:
      ConfigError: With every option that differs, old and new value.
    """
    differences = [
        f"--{name}: {saved[name]!r} -> {value!r}"
        for name, value in current.items()
        if name in saved and name not in MAY_DIFFER and saved[name] != value
    ]
    if differences:
        raise ConfigError(
            f"--workdir={workdir} holds a run of another configuration. Differences (saved -> now): "
            f"{'; '.join(differences)}. Give the saved values to continue it, another --workdir to start afresh, or "
            f"another --workdir with --warm_start={workdir} to start from its weights."
        )


def _steps(directory: pathlib.Path) -> list[int]:
    found = []
    for path in directory.glob(f"{_PREFIX}*"):
        if path.name[len(_PREFIX) :].isdigit() and (path / _MANIFEST).is_file():
            found.append(int(path.name[len(_PREFIX) :]))
    return sorted(found)


def _best_step(directory: pathlib.Path) -> int | None:
    try:
        return int(json.loads((directory / "best.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return None


def _name(step: int) -> str:
    return f"{_PREFIX}{step:09d}"


def _exchange_name(worker: int) -> str:
    return f"exchange-{worker}.safetensors"


def _write_file(path: pathlib.Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(dict(arrays), path)  # straight to the file: no second copy in memory
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: pathlib.Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _wait_for(paths: list[pathlib.Path]) -> None:
    deadline = time.monotonic() + _PEER_WAIT_SECONDS
    while missing := [path.name for path in paths if not path.exists()]:
        if time.monotonic() > deadline:
            raise OSError(
                f"{', '.join(missing)} did not appear within {_PEER_WAIT_SECONDS:.0f} s; is the workdir shared?"
            )
        time.sleep(0.05)

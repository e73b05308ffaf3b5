"""Writes a checkpoint in a hidden directory next to the complete ones, and renames it into place.

```
WORKDIR/checkpoints/
  .step-000000600.partial/             being written, by all workers together
    exchange-1.safetensors             appears whole, by a rename
    exchange-1.safetensors.failed      worker 1 could not write its file: worker 0 stops waiting
  .step-000000600.2.partial/           a second attempt at this step
  .step-000000600.replaced/            replaced by another checkpoint of the same step
  .step-000000300.removed/             being deleted
```

Whenever a process was killed, `tidy` restores or removes what it left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Mapping, Sequence

from tfpar.checkpoint import format as files
from tfpar.checkpoint.arrays import digest_in, write_arrays
from tfpar.checkpoint.format import Checkpoint, CheckpointError
from tfpar.process.whole_files import flush_names

import numpy as np

_PARTIAL, _REPLACED, _REMOVED, _FAILED = ".partial", ".replaced", ".removed", ".failed"
_PEER_WAIT_SECONDS = 120.0
_SLACK_BYTES = 1 << 16  # manifest, directories, and the overhead of the file system


def write(
    directory: pathlib.Path,
    checkpoint: Checkpoint,
    worker: int,
    workers: int,
    abandoned: threading.Event,
    attempt: int = 1,
) -> None:
    """Writes one checkpoint, this worker's part of it.

    Args:
      directory: Directory of the checkpoints; created if it does not exist.
      checkpoint: What to write. If it has exchange state, so do those of all workers; worker 0 and the following ones,
        `state_files` in total, write arrays.
      worker: Rank of this worker. Worker 0 waits for its peers' files, and puts the whole in place.
      workers: Number of workers.
      abandoned: Once set, peers are not waited for any longer.
      attempt: Number of this attempt to write a checkpoint of this step, the same on all workers. Each attempt has its
        own directory, because a peer may still be writing for one that worker 0 has given up.

    Raises:
      OSError: It could not be written. Older checkpoints are unchanged.
    """
    target = directory / files.directory_name(checkpoint.step)
    partial = _hidden(target, _PARTIAL if attempt == 1 else f".{attempt}{_PARTIAL}")
    if worker == 0:
        _remove_stale(directory, partial)
    own, digest = files_of(checkpoint, worker), ""
    frozen = files.frozen_name(worker, checkpoint.state_files)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        contents = _contents(checkpoint, own)
        if frozen in contents:
            digest = files.digest_of(contents[frozen], checkpoint.parts)
            if _link_frozen(directory, partial, frozen, digest):
                contents.pop(frozen)
        _check_space(directory, contents)
        for name, arrays in contents.items():
            parts = {each: part for each, part in checkpoint.parts.items() if each in arrays}
            write_arrays(partial / f"{name}.new", arrays, parts, digest=digest if name == frozen else "")
            os.replace(partial / f"{name}.new", partial / name)
        if worker == 0:
            writers = {name: peer for peer in range(workers) for name in files_of(checkpoint, peer)}
            _wait_for(partial, writers, abandoned)
            files.write_manifest(partial, checkpoint, workers, sorted(writers, key=_is_exchange))
            _put_in_place(partial, target)
    except BaseException as error:
        if worker == 0:
            shutil.rmtree(partial, ignore_errors=True)  # it may be the cause of the full disk
        else:
            _tell_worker_0(partial, own, error)
        raise


def files_of(checkpoint: Checkpoint, worker: int) -> list[str]:
    """Names of the files that a worker writes."""
    names = [files.state_name, *([] if checkpoint.frozen is None else [files.frozen_name])]
    state = [name(worker, checkpoint.state_files) for name in names] if worker < checkpoint.state_files else []
    return [*state, *([files.exchange_name(worker)] if checkpoint.exchange else [])]


def _contents(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, Mapping[str, np.ndarray]]:
    """The arrays of files that a worker writes, by their names."""
    frozen = {name: checkpoint.arrays[name] for name in checkpoint.frozen or () if name in checkpoint.arrays}
    rest = {name: array for name, array in checkpoint.arrays.items() if name not in frozen}
    return {
        name: checkpoint.exchange if _is_exchange(name) else frozen if files.is_frozen(name) else rest for name in names
    }


def _link_frozen(directory: pathlib.Path, partial: pathlib.Path, name: str, digest: str) -> bool:
    """Creates a hard link to a file of frozen weights in the newest checkpoint, if its contents are the same.

    It then takes no additional space, and stays until the last checkpoint with it is removed. If the file system has no
    hard links, or the file is damaged, the weights are written again.

    Args:
      directory: Of the checkpoints.
      partial: The directory in which the checkpoint is written.
      name: Name of the file.
      digest: From `format.digest_of`.

    Returns:
      Whether the new checkpoint has the file now.
    """
    with contextlib.suppress(OSError, ValueError, IndexError, CheckpointError):
        path = directory / files.directory_name(files.steps_in(directory)[-1])
        manifest, file = files.read_manifest(path), path / name
        if digest_in(file) == digest and files.fingerprint(file) == manifest["files"].get(name):
            os.link(file, partial / name)
            return True
    return False


def tidy(directory: pathlib.Path) -> None:
    """Finishes or undoes the write during which an earlier process of this run was killed. For worker 0.

    Raises:
      CheckpointError: The directory cannot be listed, so a checkpoint may be there that has not got its name back.
    """
    for replaced in _all_hidden(directory, _REPLACED):
        target = directory / replaced.name[1 : -len(_REPLACED)]
        if target.exists():
            remove(replaced)
        else:
            with contextlib.suppress(OSError):
                os.rename(replaced, target)
    for kind in (_PARTIAL, _REMOVED):
        for leftover in _all_hidden(directory, kind):
            shutil.rmtree(leftover, ignore_errors=True)


def remove(path: pathlib.Path) -> None:
    """Deletes a checkpoint. It loses its name first: half deleted, it must not look like a damaged one."""
    removed = path.with_name(f".{path.name.removeprefix('.').removesuffix(_REPLACED)}{_REMOVED}")
    with contextlib.suppress(OSError):
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(path, removed)
        shutil.rmtree(removed, ignore_errors=True)


def reason(error: BaseException) -> str:
    """What went wrong, in a few words, without the path of a hidden directory."""
    if isinstance(error, OSError) and error.strerror:
        name = os.path.basename(error.filename) if isinstance(error.filename, str) else ""
        return f"{name}: {error.strerror}" if name else error.strerror
    return str(error) or type(error).__name__


def _hidden(path: pathlib.Path, kind: str) -> pathlib.Path:
    return path.with_name(f".{path.name}{kind}")


def _all_hidden(directory: pathlib.Path, kind: str) -> list[pathlib.Path]:
    """The hidden directories of a kind; raises as `format.names_in` does."""
    return [directory / name for name in files.names_in(directory) if name.startswith(".step-") and name.endswith(kind)]


def _remove_stale(directory: pathlib.Path, partial: pathlib.Path) -> None:
    """Removes the files of peers for earlier steps and attempts that were never completed; peers may already be writing
    the next one."""

    def order(path: pathlib.Path) -> list[tuple[int, str]]:
        return [(len(number), number) for number in path.name.removesuffix(_PARTIAL).split(".")]

    with contextlib.suppress(CheckpointError):  # what is stale takes room, and is in nobody's way
        for path in _all_hidden(directory, _PARTIAL):
            if order(path) < order(partial):
                shutil.rmtree(path, ignore_errors=True)


def _check_space(directory: pathlib.Path, contents: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Fails before the disk is completely full, which would harm other programs too."""
    needed = sum(array.nbytes for arrays in contents.values() for array in arrays.values()) + _SLACK_BYTES
    disk = shutil.disk_usage(directory)
    if disk.total and disk.free < needed:  # file systems without sizes report 0
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:.1f} MB needed, {disk.free / 1e6:.1f} MB free"
        )


def _put_in_place(partial: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a complete checkpoint its name; at every moment at least one complete one of the step exists."""
    directory = target.parent
    replaced = _hidden(target, _REPLACED)
    again = target.exists()  # the same step again, e.g. after a restart from an older one
    if again:
        os.rename(target, replaced)
    try:
        os.rename(partial, target)
    except BaseException:
        if again:
            os.rename(replaced, target)
        raise
    flush_names(target.name, directory, directory.parent)  # of the first checkpoint, the directory itself is new
    if again:
        remove(replaced)


def _is_exchange(name: str) -> bool:
    return name.startswith("exchange-")


def _tell_worker_0(partial: pathlib.Path, names: Sequence[str], error: BaseException) -> None:
    """Marks that files will not appear, and why. An empty marker often fits where nothing else does.

    A marker appears by a rename: worker 0 must not read it before the reason is in it.
    """
    for name in names:
        marker = partial / f"{name}.new"  # in place of the part that was written, which filled the disk
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            partial.mkdir(parents=True, exist_ok=True)
            marker.touch()
            with contextlib.suppress(OSError):
                marker.write_text(reason(error))
            os.replace(marker, partial / f"{name}{_FAILED}")


def _wait_for(partial: pathlib.Path, names: Mapping[str, int], abandoned: threading.Event) -> None:
    """Waits for files of other workers.

    Args:
      partial: Where they will appear.
      names: The files, with the workers that write them.
      abandoned: Once set, waiting ends.

    Raises:
      OSError: One of them could not be written, or did not appear while nothing was written for a while, or waiting
        was abandoned.
    """
    deadline, before = time.monotonic() + _PEER_WAIT_SECONDS, _progress(partial)
    while missing := [name for name in names if not (partial / name).exists()]:
        for name in missing:
            failed = partial / f"{name}{_FAILED}"
            if failed.exists():
                why = failed.read_text().strip() or "no room to write down why"
                what = "exchange state" if _is_exchange(name) else "part of the weights"
                raise OSError(f"worker {names[name]} could not write its {what}: {why}")
        if abandoned.wait(0.05):
            raise OSError(f"the run ended before {', '.join(missing)} appeared")
        if time.monotonic() > deadline:
            if (now := _progress(partial)) == before:
                raise OSError(
                    f"{', '.join(missing)} did not appear within {_PEER_WAIT_SECONDS:.0f} s; is the workdir shared?"
                )
            deadline, before = time.monotonic() + _PEER_WAIT_SECONDS, now


def _progress(partial: pathlib.Path) -> set[tuple[str, int, int]]:
    """Names, sizes and times of the files in a directory, which change while a peer writes a large one."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(partial) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # renamed in the meantime
                status = entry.stat()
                found.add((entry.name, status.st_size, status.st_mtime_ns))
    return found

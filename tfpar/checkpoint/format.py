"""The format of one checkpoint: a directory that is written atomically, and read only if it is intact.

```
step-000000600/
  manifest.json          format version, step, run state, configuration, size and SHA-256 of every other file,
                         sealed by its own SHA-256
  state.safetensors      variables of model and optimizer, by path
  state-frozen.safetensors  frozen weights, where there are such: one file under a name in each checkpoint
  exchange-0.safetensors exchange state (residuals) of worker 0; only where the exchange has any
```

If several workers hold a model between them, each writes its own part of the variables:

```
  state-00001-of-00002.safetensors  what worker 0 holds: whole variables, and parts of divided ones
  state-00002-of-00002.safetensors  what worker 1 holds
  state-frozen-00001-of-00002.safetensors  of frozen weights, where there are such, what worker 0 holds
  state-frozen-00002-of-00002.safetensors  what worker 1 holds
```

If there are several files of variables, the manifest has an index of the parts of each variable within the whole, so
that any other mesh can read the checkpoint, and each worker only what it needs.

Nothing in a checkpoint is executed when it is read. A manifest is not trusted: file names in it cannot point outside
the directory, and a value of a wrong type counts as damage.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tfpar.checkpoint.arrays import (
    Index,
    Part,
    SavedArrays,
    index_as_json,
    index_from_json,
    index_of,
    read_arrays,
)
from tfpar.config.errors import TrainingError
from tfpar.process.exit_codes import USAGE_ERROR
from tfpar.process.whole_files import sync_directory, write_file

import numpy as np

FORMAT = 3
_READABLE = (2, FORMAT)  # 2 has no index
STATE = "state.safetensors"
FROZEN = "state-frozen.safetensors"
_FROZEN_PREFIX = "state-frozen"
MANIFEST = "manifest.json"
_PREFIX = "step-"
_STATE_FILE = re.compile(r"state(-frozen)?(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_FILE = re.compile(rf"{_STATE_FILE.pattern}|exchange-(0|[1-9][0-9]{{0,5}})\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Bytes. A part of a variable takes about 220 in the index: those of 5,000 variables on 400 workers fit.
_LARGEST_MANIFEST = 1 << 29
_LARGEST_NUMBER = 1 << 62
_SEAL = 65  # characters of a SHA-256 and the end of its line
_CHUNK = 1 << 22


class CheckpointError(TrainingError):
    """A checkpoint could not be written, with `on_error` `fail`; or existing ones cannot be listed or read."""


class UnknownFormatError(CheckpointError):
    """A checkpoint has a format that this version does not read. It is whole: another version of tfpar reads it."""

    exit_code = USAGE_ERROR  # another start of the same version would find the same


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
      step: Steps done.
      arrays: `model/PATH` and `optimizer/PATH` -> value: those of the writing worker or, after reading, all
        (`SavedArrays`).
      exchange: Exchange state of the reading worker, by name.
      run: Everything else that defines the run, JSON-able: seeds, input position, loss scale, plateau, best value.
      config: The configuration, by flag name.
      parts: For arrays of the writing worker that are parts, their place in the whole.
      state_files: Number of workers, from worker 0 on, that write arrays.
      frozen: Names of arrays of the writing worker that are expected to be the same in the next checkpoint; None if no
        worker has such.
    """

    step: int
    arrays: Mapping[str, np.ndarray]
    exchange: Mapping[str, np.ndarray]
    run: Mapping[str, Any]
    config: Mapping[str, Any]
    parts: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    state_files: int = 1
    frozen: Collection[str] | None = None


def directory_name(step: int) -> str:
    """The name of the directory of a checkpoint."""
    return f"{_PREFIX}{step:09d}"


def state_name(worker: int, state_files: int) -> str:
    """The name of the file with the variables that a worker holds, of those that `state_files` workers hold."""
    return STATE if state_files == 1 else f"state-{worker + 1:05d}-of-{state_files:05d}.safetensors"


def frozen_name(worker: int, state_files: int) -> str:
    """The name of the file with the frozen weights that a worker holds, see `state_name`."""
    return FROZEN if state_files == 1 else f"{_FROZEN_PREFIX}-{worker + 1:05d}-of-{state_files:05d}.safetensors"


def is_frozen(name: str) -> bool:
    """Whether it is the name of a file with frozen weights."""
    return name.startswith(_FROZEN_PREFIX)


def exchange_name(worker: int) -> str:
    """The name of the file with a worker's exchange state."""
    return f"exchange-{worker}.safetensors"


def steps_in(directory: pathlib.Path) -> list[int]:
    """Steps of the checkpoints in a directory, the oldest first. Does not read their contents; raises as `names_in`."""
    found = []
    for name, is_folder in names_in(directory).items():
        number = name.removeprefix(_PREFIX)
        if is_folder and number.isdecimal() and name == directory_name(int(number)):
            found.append(int(number))
    return sorted(found)


def names_in(directory: pathlib.Path) -> dict[str, bool]:
    """Names in a directory of checkpoints, and whether each is a directory; empty if there is no such directory.

    Raises:
      CheckpointError: It cannot be listed. Nobody knows then whether it holds checkpoints.
    """
    try:
        with os.scandir(directory) as entries:  # `Path.glob` hides errors: there would seem to be no checkpoint
            return {entry.name: entry.is_dir() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {directory} cannot be listed ({error.strerror}). There may be some, so nothing "
            "goes on as if there were none. Start again once the directory can be read, or name another one."
        ) from error


# Writing.


def write_manifest(path: pathlib.Path, checkpoint: Checkpoint, workers: int, files: Sequence[str]) -> None:
    """Writes the manifest of a checkpoint whose other files are complete, and flushes the directory to the disk.

    Args:
      path: The directory.
      checkpoint: Its contents.
      workers: Number of workers that wrote it.
      files: Names of the other files.
    """
    states = [path / name for name in files if _STATE_FILE.fullmatch(name)]
    manifest = {
        "format": FORMAT,
        "step": checkpoint.step,
        "workers": workers,
        "run": dict(checkpoint.run),
        "config": dict(checkpoint.config),
        "files": {name: fingerprint(path / name) for name in files},
        **({"index": index_as_json(index_of(states))} if len(states) > 1 else {}),
    }
    write_file(path / MANIFEST, seal(manifest))
    sync_directory(path)


def digest_of(arrays: Mapping[str, np.ndarray], parts: Mapping[str, Part]) -> str:
    """SHA-256 of arrays with their names, types and shapes, and of their places in the whole."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        place = json.dumps(parts[name].as_json()) if name in parts else ""
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape} {place}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return digest.hexdigest()


def seal(content: Mapping[str, Any]) -> bytes:
    """JSON with its own checksum as the last line: readable, and protected against unnoticed changes."""
    text = json.dumps(content, indent=1) + "\n"
    return (text + hashlib.sha256(text.encode()).hexdigest() + "\n").encode()


# Reading.


def unseal(path: pathlib.Path) -> dict[str, Any]:
    """The contents of a file written by `seal`.

    Raises:
      OSError: No such file, or it cannot be read.
      ValueError: It has changed since, or is not a JSON object.
    """
    with open(path, "rb") as file:
        content = file.read(_LARGEST_MANIFEST + 1)
    if len(content) > _LARGEST_MANIFEST:
        raise ValueError(f"{path.name} is larger than {_LARGEST_MANIFEST} bytes")
    text, checksum = content[:-_SEAL], content[-_SEAL:]
    if hashlib.sha256(text).hexdigest().encode() + b"\n" != checksum:
        raise ValueError(f"{path.name} does not match its checksum")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """The manifest of the checkpoint in a directory: `step`, `workers`, `run`, `config`, `files`, and maybe `index`.

    Raises:
      OSError: There is none, or it cannot be read.
      ValueError: It is damaged.
      UnknownFormatError: It is of another version.
    """
    manifest = unseal(path / MANIFEST)
    _check_number(manifest, "format", 0)
    if manifest["format"] not in _READABLE:
        raise UnknownFormatError(
            f"{path} has checkpoint format {manifest['format']}, and this version of tfpar reads "
            f"{' and '.join(map(str, _READABLE))}. The checkpoint is not damaged: use the version of tfpar that wrote "
            "it, or move it away."
        )
    _check_number(manifest, "step", 0)
    _check_number(manifest, "workers", 1)
    if path.name.startswith(_PREFIX) and path.name != directory_name(manifest["step"]):
        raise ValueError(f"{MANIFEST} belongs to step {manifest['step']}")
    for key in ("run", "config", "files"):
        if not isinstance(manifest.get(key), dict):
            raise ValueError(f"{MANIFEST} has no {key!r}, or one that is not an object")
    states = len(_state_files(manifest))
    frozen = sum(is_frozen(name) for name in manifest["files"])
    writers = states - frozen
    exchanges = len(manifest["files"]) - states
    if not max(0, frozen - 1) < writers <= manifest["workers"] or exchanges not in (0, manifest["workers"]):
        raise ValueError(f"{MANIFEST} names {len(manifest['files'])} files, of {manifest['workers']} workers")
    if states > 1 and not isinstance(manifest.get("index"), dict):
        raise ValueError(f"{MANIFEST} has no index of its {states} files")
    for name, expected in manifest["files"].items():
        if not _FILE.fullmatch(name):  # no file outside the directory or of another kind
            raise ValueError(f"{MANIFEST} names {name!r}, which is not the name of a checkpoint file")
        if not isinstance(expected, dict) or not _SHA256.fullmatch(str(expected.get("sha256"))):
            raise ValueError(f"{MANIFEST} has no checksum of {name}")
        _check_number(expected, "bytes", 0)
    return manifest


def _check_number(values: Mapping[str, Any], key: str, least: int) -> None:
    value = values.get(key)
    if type(value) is not int or not least <= value < _LARGEST_NUMBER:
        raise ValueError(f"{MANIFEST} has {key}={str(value)[:40]!r}")


def read(
    path: str | os.PathLike[str],
    *,
    worker: int | None = None,
    workers: int | None = None,
    needed: Callable[[SavedArrays], Collection[str]] | None = None,
) -> Checkpoint:
    """Reads one checkpoint directory and verifies its checksums.

    Args:
      path: Directory of the checkpoint.
      worker: Rank of the worker whose exchange state to read; None reads and verifies none.
      workers: Number of workers that read it. If it differs from the number that wrote it, the exchange files of all
        are verified, because their residuals are then redistributed.
      needed: Which files of arrays the caller will read, by their names. They are verified now, others before they are
        first read. By default all.

    Returns:
      The checkpoint. Its arrays are read from the disk on access.

    Raises:
      OSError: A file that is missing or cannot be read.
      ValueError: A file that is truncated or changed.
      UnknownFormatError: The checkpoint is of another version.
    """
    path = pathlib.Path(path)
    manifest = read_manifest(path)
    own = "" if worker is None else exchange_name(worker)
    verifies_all = worker is not None and workers is not None and workers != manifest["workers"]
    exchange: Mapping[str, np.ndarray] = {}
    for name, expected in manifest["files"].items():
        if _STATE_FILE.fullmatch(name):
            continue
        if verifies_all or name == own:
            _verify(path / name, expected)
        if name == own:
            exchange = read_arrays(path / name)
    arrays = _saved_arrays(path, manifest)
    arrays.open(_state_files(manifest) if needed is None else needed(arrays))
    return Checkpoint(
        step=manifest["step"], arrays=arrays, exchange=exchange, run=manifest["run"], config=manifest["config"]
    )


def _saved_arrays(path: pathlib.Path, manifest: Mapping[str, Any]) -> SavedArrays:
    states = _state_files(manifest)
    index: Index | None = None
    if len(states) > 1:
        try:
            index = index_from_json(manifest["index"], states)
        except ValueError as error:
            raise ValueError(f"{MANIFEST}: {error}") from error
    return SavedArrays(path, states, lambda file: _verify(file, manifest["files"][file.name]), index)


def _state_files(manifest: Mapping[str, Any]) -> list[str]:
    return [name for name in manifest["files"] if _STATE_FILE.fullmatch(name)]


def read_exchange(path: pathlib.Path, worker: int) -> Mapping[str, np.ndarray]:
    """The exchange state that a worker saved, empty if it had none; raises as `read` does."""
    name = exchange_name(worker)
    expected = read_manifest(path)["files"].get(name)
    if expected is None:
        return {}
    _verify(path / name, expected)
    return read_arrays(path / name)


def _verify(path: pathlib.Path, expected: Mapping[str, Any]) -> None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a file")
    if status.st_size != expected["bytes"]:
        raise ValueError(f"{path.name} has {status.st_size} bytes instead of {expected['bytes']}")
    if fingerprint(path) != expected:
        raise ValueError(f"{path.name} does not match its checksum")


def fingerprint(path: pathlib.Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, in the form of a manifest."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}

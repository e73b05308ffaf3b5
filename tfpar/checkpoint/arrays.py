"""Arrays in safetensors files: whole arrays, and arrays whose parts are in several files.

A file has a JSON header and raw bytes: nothing in it is executed when it is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

_LARGEST_LENGTH = 1 << 48


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an array: ranges of one dimension, joined, or of its elements in order.

    Attributes:
      shape: Shape of the whole.
      axis: The dimension that is divided; None if the array is flattened first. The part is then a vector.
      stretches: Start and length of each range in the whole, in their order in the part.
    """

    shape: tuple[int, ...]
    axis: int | None
    stretches: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...], axis: int | None) -> Part:
        """All of an array, as a part."""
        empty = cls(shape, axis, ())
        return dataclasses.replace(empty, stretches=((0, empty.length),))

    @property
    def length(self) -> int:
        """Length of the divided dimension in the whole, or its number of elements."""
        return math.prod(self.shape) if self.axis is None else self.shape[self.axis]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        length = sum(length for _, length in self.stretches)
        if self.axis is None:
            return (length,)
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    def as_json(self) -> dict[str, Any]:
        """The part in JSON form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Part:
        """The part from the result of `as_json`.

        Raises:
          ValueError: The value is invalid, for example a range outside the whole.
        """
        try:
            part = cls(
                tuple(_length(size) for size in value["shape"]),
                None if value["axis"] is None else _length(value["axis"]),
                tuple((_length(start), _length(length)) for start, length in value["stretches"]),
            )
            if all(start + length <= part.length for start, length in part.stretches):
                return part
        except (KeyError, TypeError, IndexError, ValueError):
            pass
        raise ValueError(f"{str(value)[:80]} is no part of an array")


# For every array, the files that hold it, each with its part, or None for the whole array.
Index = Mapping[str, Sequence[tuple[str, Part | None]]]


def write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray], parts: Mapping[str, Part] | None = None) -> None:
    """Writes a safetensors file and flushes it to the disk.

    Args:
      path: The file.
      arrays: The arrays by name.
      parts: For arrays that are parts, their place in the whole; recorded in the file's header.

    Raises:
      OSError: The file could not be written.
    """
    notes = {name: json.dumps(part.as_json()) for name, part in (parts or {}).items()}
    try:
        safetensors.numpy.save_file(dict(arrays), path, metadata=notes or None)  # no second copy in memory
    except safetensors.SafetensorError as error:  # how the library reports a full disk
        raise OSError(str(error)) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def index_of(paths: Sequence[pathlib.Path]) -> dict[str, list[tuple[str, Part | None]]]:
    """An index of the arrays in files written by `write_arrays`. Reads only their headers.

    Raises:
      ValueError: A file that cannot be read.
    """
    index: dict[str, list[tuple[str, Part | None]]] = {}
    for path in paths:
        file = _opened(path)
        notes = file.metadata() or {}
        for name in file.keys():  # noqa: SIM118
            part = Part.from_json(json.loads(notes[name])) if name in notes else None
            index.setdefault(name, []).append((path.name, part))
    return index


def index_as_json(index: Index) -> dict[str, Any]:
    """An index in JSON form."""
    return {
        name: [{"file": file, **({"part": part.as_json()} if part else {})} for file, part in places]
        for name, places in index.items()
    }


def index_from_json(value: Any, files: Collection[str]) -> dict[str, list[tuple[str, Part | None]]]:
    """The index from the result of `index_as_json`.

    Args:
      value: The JSON.
      files: Names of the existing files.

    Raises:
      ValueError: It is not an index, or the parts of an array do not add up to the whole.
    """
    if not isinstance(value, dict):
        raise ValueError("the index is not an object")
    index = {}
    for name, places in value.items():
        if not isinstance(places, list) or not all(
            isinstance(place, dict) and isinstance(place.get("file"), str) and place["file"] in files
            for place in places
        ):
            raise ValueError(f"the index names no files of {name[:80]!r}")
        index[name] = [(place["file"], Part.from_json(place["part"]) if "part" in place else None) for place in places]
        _check_complete(name, [part for _, part in index[name]])
    return index


class SavedArrays(Mapping[str, np.ndarray]):
    """Arrays in files, by name. They are read from the disk on access, wholly or in part.

    Args:
      directory: Where the files are.
      files: Their names.
      verify: Called with the path of a file before its first read; raises if the file is damaged.
      index: What the files hold; None for one file of whole arrays.

    Raises:
      OSError, ValueError: A file is missing, damaged or not a safetensors file; from every method.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        files: Sequence[str],
        verify: Callable[[pathlib.Path], None],
        index: Index | None = None,
    ) -> None:
        self._directory, self._verify = directory, verify
        self._files: dict[str, Any] = {}
        if index is None:
            index = {name: [(file, None)] for file in files for name in self._file(file).keys()}  # noqa: SIM118
        self._index = index

    def __getitem__(self, name: str) -> np.ndarray:
        """The whole array, a copy."""
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def only(self, names: Collection[str]) -> SavedArrays:
        """The arrays with these names."""
        index = {name: places for name, places in self._index.items() if name in names}
        return SavedArrays(self._directory, (), self._verify, index)

    def files_of(self, name: str, wanted: Part | None = None) -> list[str]:
        """Names of the files that `read` opens."""
        return [file for file, part in self._index[name] if wanted is None or _overlap(part, wanted)]

    def open(self, files: Collection[str]) -> None:
        """Verifies files and opens them."""
        for file in files:
            self._file(file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole array."""
        file, part = self._index[name][0]
        return part.shape if part else tuple(self._tensor(file, name).get_shape())

    def read(self, name: str, wanted: Part | None = None) -> np.ndarray:
        """An array, or a part of it, a copy.

        Args:
          name: Its name.
          wanted: The part; all of it if None.
        """
        file, first = self._index[name][0]
        if wanted is None:
            if first is None:
                return self._file(file).get_tensor(name)
            return self.read(name, Part.whole(first.shape, first.axis)).reshape(first.shape)
        saved = first.axis if first else wanted.axis or 0
        if wanted.axis != saved:
            return self._read_across(name, wanted, saved)
        pieces = [piece for start, length in wanted.stretches for piece in self._pieces(name, wanted, start, length)]
        return np.concatenate(pieces, axis=wanted.axis or 0)

    def _read_across(self, name: str, wanted: Part, saved: int | None) -> np.ndarray:
        """`read` for a part along another dimension than the saved ones."""
        row = math.prod(wanted.shape[1:])
        if wanted.axis == 0 and saved is None:
            stretches = tuple((start * row, length * row) for start, length in wanted.stretches)
            return self.read(name, Part(wanted.shape, None, stretches)).reshape(wanted.part_shape)
        if wanted.axis is None and saved == 0:
            pieces = []
            for start, length in wanted.stretches:
                begin, end = start // row, -(-(start + length) // row)
                rows = self.read(name, Part(wanted.shape, 0, ((begin, end - begin),)))
                pieces.append(rows.reshape(-1)[start - begin * row :][:length])
            return np.concatenate(pieces)
        whole = self.read(name)
        if wanted.axis is None:
            whole = whole.reshape(-1)
        pieces = [_along(whole, wanted.axis, *stretch) for stretch in wanted.stretches]
        return np.concatenate(pieces, axis=wanted.axis or 0)

    def _pieces(self, name: str, wanted: Part, start: int, length: int) -> Iterator[np.ndarray]:
        """The pieces of a range of a divided array, in order."""
        while length > 0:
            file, offset, there = next(
                (file, at + start - first, first + size - start)
                for file, part in self._index[name]
                for first, size, at in _placed(part, wanted)
                if first <= start < first + size
            )
            taken = min(length, there)
            yield _along(self._tensor(file, name), wanted.axis, offset, taken)
            start, length = start + taken, length - taken

    def _tensor(self, file: str, name: str) -> Any:
        return self._file(file).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self._directory / name
            self._verify(path)
            self._files[name] = _opened(path)
        return self._files[name]


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of a file.

    Raises:
      ValueError: It is not a safetensors file, or holds a type that NumPy lacks.
    """
    file = _opened(path)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


# The types of numbers that NumPy has, as the header of a file names them.
_TYPES = frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})


def _opened(path: pathlib.Path) -> Any:
    """A file whose header has been read."""
    try:
        file = safetensors.safe_open(path, framework="numpy")
        types = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if unknown := types - _TYPES:
        raise ValueError(f"{path.name} holds a type that cannot be read: {', '.join(sorted(unknown))}")
    return file


def _length(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_LENGTH:
        raise ValueError(f"{str(value)[:40]} is no length")
    return value


def _check_complete(name: str, parts: Sequence[Part | None]) -> None:
    """Raises ValueError unless an array is whole in one file, or its parts cover it."""
    if len(parts) == 1 and parts[0] is None:
        return
    first = parts[0] if parts else None
    if first is not None and all(part and (part.shape, part.axis) == (first.shape, first.axis) for part in parts):
        end = 0
        for start, length in sorted(stretch for part in parts if part for stretch in part.stretches):
            end = max(end, start + length) if start <= end else -1
            if end < 0:
                break
        if end == first.length:
            return
    raise ValueError(f"the parts of {name[:80]!r} do not make a whole")


def _placed(part: Part | None, wanted: Part) -> Iterator[tuple[int, int, int]]:
    """Start and length of each range of a part in the whole, and its start in the part."""
    if part is None:
        yield 0, wanted.length, 0
        return
    at = 0
    for start, length in part.stretches:
        yield start, length, at
        at += length


def _overlap(part: Part | None, wanted: Part) -> bool:
    if part is None or part.axis != wanted.axis:
        return True
    return any(
        first < start + length and start < first + size
        for first, size in part.stretches
        for start, length in wanted.stretches
    )


def _along(tensor: Any, axis: int | None, start: int, length: int) -> np.ndarray:
    return tensor[(*[slice(None)] * (axis or 0), slice(start, start + length))]

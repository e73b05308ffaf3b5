"""Arrays in safetensors files: whole arrays, and arrays whose parts are in several files.

A file has a JSON header and raw bytes: nothing in it is executed when it is read.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

# The types of numbers in a file, as its header names them: those of Keras' variables that the format has.
_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "C64": np.complex64,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LARGEST_LENGTH = 1 << 48
_DIGEST = "digest"  # in the header of a file, beside the names of parts
_MOST_CELLS = 1 << 26  # of the grid that the parts of an array make

# Start and length of each range of a dimension.
Ranges = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an array: of each divided dimension some ranges, joined.

    Attributes:
      shape: Shape of the whole.
      ranges: For each divided dimension, its ranges in the whole, in their order in the part.
    """

    shape: tuple[int, ...]
    ranges: Mapping[int, Ranges] = dataclasses.field(default_factory=dict)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(length for _, length in self.of_dimension(axis)) for axis in range(len(self.shape)))

    def of_dimension(self, axis: int) -> Ranges:
        """The ranges of a dimension."""
        return self.ranges.get(axis, ((0, self.shape[axis]),))

    def common(self, other: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """The boxes that this part has in common with another one of the same whole: where they are in this part, and
        where in the other."""
        axes = range(len(self.shape))
        pairs = (_common(self.of_dimension(axis), other.of_dimension(axis)) for axis in axes)
        for box in itertools.product(*pairs):
            yield tuple(own for own, _ in box), tuple(others for _, others in box)

    def as_json(self) -> dict[str, Any]:
        """The part in JSON form."""
        return {"shape": self.shape, "ranges": {str(axis): list(ranges) for axis, ranges in self.ranges.items()}}

    @classmethod
    def from_json(cls, value: Any) -> Part:
        """The part from the result of `as_json`.

        Raises:
          ValueError: The value is invalid, for example a range outside the whole.
        """
        if isinstance(value, dict) and "ranges" not in value and value.get("axis", 0) is None:
            raise ValueError("a part of a flattened array, which an earlier version wrote, cannot be read")
        try:
            shape = tuple(_length(size) for size in value["shape"])
            # Earlier versions divided one dimension.
            earlier = "ranges" not in value
            given = {value["axis"]: value["stretches"]} if earlier else value["ranges"]
            ranges = {_length(axis if earlier else int(axis)): _ranges(each) for axis, each in given.items()}
            if all(start + length <= shape[axis] for axis, each in ranges.items() for start, length in each):
                return cls(shape, ranges)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):
            pass
        raise ValueError(f"{str(value)[:80]} is no part of an array")


# For every array, the files that hold it, each with its part, or None for the whole array.
Index = Mapping[str, Sequence[tuple[str, Part | None]]]


def write_arrays(
    path: pathlib.Path,
    arrays: Mapping[str, np.ndarray],
    parts: Mapping[str, Part] | None = None,
    *,
    digest: str = "",
) -> None:
    """Writes a safetensors file and flushes it to the disk.

    Args:
      path: The file.
      arrays: The arrays by name.
      parts: For arrays that are parts, their place in the whole; recorded in the file's header.
      digest: A digest of the arrays, for `digest_in`.

    Raises:
      OSError: The file could not be written.
    """
    notes = {name: json.dumps(part.as_json()) for name, part in (parts or {}).items()}
    if digest:
        notes[_DIGEST] = digest
    # safetensors 0.8 writes the memory of an array as it lies, and takes no NumPy scalars.
    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # a copy only of other layouts
    with open(path, "wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        safetensors.numpy.save_file(in_order, path, metadata=notes or None)  # no second copy in memory
    except safetensors.SafetensorError as error:  # how the library reports a full disk
        path.unlink(missing_ok=True)
        raise OSError(str(error)) from error
    with open(path, "rb") as file:
        with contextlib.suppress(OSError):  # a file system without permissions
            os.fchmod(file.fileno(), mode)  # safetensors 0.8 replaces the file with one that only its owner may read
        os.fsync(file.fileno())


def digest_in(path: pathlib.Path) -> str:
    """The digest that a file was written with; empty if it has none.

    Raises:
      ValueError: A file that cannot be read.
    """
    return _opened(path).notes.get(_DIGEST, "")


def index_of(paths: Sequence[pathlib.Path]) -> dict[str, list[tuple[str, Part | None]]]:
    """An index of the arrays in files written by `write_arrays`. Reads only their headers.

    Raises:
      ValueError: A file that cannot be read.
    """
    index: dict[str, list[tuple[str, Part | None]]] = {}
    for path in paths:
        file = _opened(path)
        for name in file.arrays:
            part = Part.from_json(json.loads(file.notes[name])) if name in file.notes else None
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
        self._files: dict[str, _File] = {}
        if index is None:
            index = {name: [(file, None)] for file in files for name in self._file(file).arrays}
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
        places = self._index[name]
        return [file for file, part in places if wanted is None or part is None or any(part.common(wanted))]

    def open(self, files: Collection[str]) -> None:
        """Verifies files and opens them."""
        for file in files:
            self._file(file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole array."""
        file, part = self._index[name][0]
        return part.shape if part else self._file(file).arrays[name].shape

    def read(self, name: str, wanted: Part | None = None) -> np.ndarray:
        """An array, or a part of it, a copy.

        Args:
          name: Its name.
          wanted: The part; all of it if None.
        """
        file, first = self._index[name][0]
        if wanted is None and first is None:
            return self._file(file).arrays[name].copy()
        wanted = wanted or Part(self.shape(name))
        result: np.ndarray | None = None
        for file, part in self._index[name]:
            for there, here in (part or Part(wanted.shape)).common(wanted):
                piece = self._file(file).arrays[name][there]
                result = np.empty(wanted.part_shape, piece.dtype) if result is None else result
                result[here] = piece
        return np.empty(wanted.part_shape, np.float32) if result is None else result  # it has no elements

    def _file(self, name: str) -> _File:
        if name not in self._files:
            path = self._directory / name
            self._verify(path)
            self._files[name] = _opened(path)
        return self._files[name]


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of a file.

    Raises:
      ValueError: It is not a safetensors file, or holds a type of numbers that cannot be read.
    """
    return {name: array.copy() for name, array in _opened(path).arrays.items()}


@dataclasses.dataclass(frozen=True)
class _File:
    """A file whose header has been read.

    Attributes:
      notes: What the header has beside the arrays.
      arrays: Views of the file, mapped into memory.
    """

    notes: Mapping[str, str]
    arrays: Mapping[str, np.ndarray]


def _opened(path: pathlib.Path) -> _File:
    """The contents of a file.

    safetensors checks the header, and NumPy reads the arrays: safetensors 0.8 gives NumPy no float8, and older versions
    no bfloat16.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            notes, names = file.metadata() or {}, file.keys()
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    content = np.asarray(np.memmap(path, np.uint8, mode="r"))
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    if unknown := {header[name]["dtype"] for name in names} - _TYPES.keys():
        raise ValueError(f"{path.name} holds a type that cannot be read: {', '.join(sorted(unknown))}")

    def view(dtype: str, shape: Sequence[int], data_offsets: tuple[int, int]) -> np.ndarray:
        first, end = data_offsets
        return content[start + first : start + end].view(_TYPES[dtype]).reshape(shape)

    return _File(notes, {name: view(**header[name]) for name in names})


def _ranges(value: Any) -> Ranges:
    return tuple((_length(start), _length(length)) for start, length in value)


def _length(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_LENGTH:
        raise ValueError(f"{str(value)[:40]} is no length")
    return value


def _check_complete(name: str, parts: Sequence[Part | None]) -> None:
    """Raises ValueError unless an array is whole in one file, or its parts cover it."""
    if len(parts) == 1 and parts[0] is None:
        return
    known = [part for part in parts if part is not None]
    if known and len(known) == len(parts) and all(part.shape == known[0].shape for part in known):
        ends = [_ends(known, axis) for axis in range(len(known[0].shape))]
        cells = [max(len(each) - 1, 0) for each in ends]
        if math.prod(cells) <= _MOST_CELLS:
            covered = np.zeros(cells, bool)
            for part in known:
                covered[np.ix_(*(_cells(part.of_dimension(axis), each) for axis, each in enumerate(ends)))] = True
            if covered.all():
                return
    raise ValueError(f"the parts of {name[:80]!r} do not make a whole")


def _ends(parts: Sequence[Part], axis: int) -> list[int]:
    """Where ranges of a dimension begin or end, ascending."""
    ranges = [(0, parts[0].shape[axis]), *(each for part in parts for each in part.of_dimension(axis))]
    return sorted({end for start, length in ranges for end in (start, start + length)})


def _cells(ranges: Ranges, ends: Sequence[int]) -> np.ndarray:
    """For each interval between consecutive ends, whether the ranges cover it."""
    inside = np.zeros(max(len(ends) - 1, 0), bool)
    for start, length in ranges:
        inside[bisect.bisect_left(ends, start) : bisect.bisect_left(ends, start + length)] = True
    return inside


def _common(own: Ranges, others: Ranges) -> list[tuple[slice, ...]]:
    """Where ranges have elements in common, in one sequence of ranges and in the other."""
    found = []
    at = 0
    for start, length in own:
        there = 0
        for first, size in others:
            low, high = max(start, first), min(start + length, first + size)
            if low < high:
                shifts = (at - start, there - first)
                found.append(tuple(slice(low + shift, high + shift) for shift in shifts))
            there += size
        at += length
    return found

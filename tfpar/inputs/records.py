"""Random access to serialised records in TFRecord and ArrayRecord files.

A TFRecord file has no index, so the reader builds one by walking over the headers. Each record is
`uint64 length | uint32 masked CRC32C of the length | data | uint32 masked CRC32C of the data`.
The scan reads the headers only and verifies all their checksums at once, so it also detects
compressed or truncated files before the run starts. Records are then read with positioned reads,
many per call and several calls at a time: reads release the interpreter lock. The checksum of a
record's data is verified when the record is read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import tfpar_ops
from tfpar.config import ConfigError

import numpy as np
import tensorflow as tf

_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
_SCAN_THREADS = 16
# Files that stay open; further files are opened again for each batch. Well under the usual limit of 1,024 per process.
_MAX_OPEN_FILES = 256


@dataclasses.dataclass(frozen=True)
class FileSlice:
    """`take` consecutive records of one file, starting at record `skip`; `take=-1` takes all remaining records."""

    path: str
    skip: int = 0
    take: int = -1


class RecordError(ValueError):
    """A record differs from what was written."""


class RecordReader(Protocol):
    """Reads serialised examples by index from a sequence of files."""

    def read(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n] -> object array [n] of bytes."""


def scan_tfrecord(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Locates every record of an uncompressed TFRecord file.

    Args:
      path: A local path, or any URL that `tf.io.gfile` opens (`gs://...`).

    Returns:
      The offset of each record's data in the file and its length, int64 [records] each, in bytes.

    Raises:
      ConfigError: The file is missing, compressed, truncated, or not a TFRecord file.
    """
    try:
        with _open(path) as file:
            headers, offsets, complete = _walk_headers(file, os.stat(path).st_size if _is_local(path) else file.size())
    except (OSError, tf.errors.OpError) as error:
        raise ConfigError(f"TFRecord file {path!r} cannot be read: {error}") from error
    raw = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, _HEADER.size)
    checksums = raw[:, 8:].copy().view("<u4")[:, 0]
    mismatches = np.flatnonzero(checksums != tfpar_ops.masked_crc32c([header[:8] for header in headers]))
    if len(mismatches):
        raise ConfigError(
            f"TFRecord file {path!r}: the header of record {mismatches[0]} fails its checksum. The file is "
            "damaged, compressed or not a TFRecord file; random access needs uncompressed files. Write it again, e.g. "
            "with python -m tfpar.inputs.write."
        )
    if not complete:
        raise ConfigError(
            f"TFRecord file {path!r} ends inside record {len(offsets) - 1}: the file is incomplete. Copy it again."
        )
    return np.asarray(offsets, np.int64), raw[:, :8].copy().view("<u8")[:, 0].astype(np.int64)


class TFRecordReader:
    """Reads records of uncompressed TFRecord files by index.

    Args:
      slices: Which records of which files, in index order.

    Raises:
      ConfigError: A file is not an intact TFRecord file, or holds fewer records than a slice takes.
    """

    def __init__(self, slices: Sequence[FileSlice]):
        with concurrent.futures.ThreadPoolExecutor(_SCAN_THREADS) as pool:
            scans = list(pool.map(scan_tfrecord, [part.path for part in slices]))
        offsets, lengths, counts = [], [], []
        for part, (file_offsets, file_lengths) in zip(slices, scans, strict=True):
            stop = len(file_offsets) if part.take < 0 else part.skip + part.take
            if stop > len(file_offsets):
                raise ConfigError(
                    f"TFRecord file {part.path!r} holds {len(file_offsets)} records where {stop} are expected: it "
                    "belongs to another index, or the copy is incomplete. Copy or write the file again."
                )
            offsets.append(file_offsets[part.skip : stop])
            lengths.append(file_lengths[part.skip : stop])
            counts.append(stop - part.skip)
        self.paths = [part.path for part in slices]
        self.records_per_file = tuple(counts)
        self._offsets = np.concatenate(offsets) if offsets else np.zeros(0, np.int64)
        self._lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        self._ends = np.cumsum(counts)
        self._open_files = [_open_for_reads(path) if _is_local(path) else None for path in self.paths[:_MAX_OPEN_FILES]]

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n] -> object array [n] of bytes. Safe to call from several threads.

        Raises:
          RecordError: A record extends past the end of the file, or does not match its checksum.
          OSError: A file cannot be read.
        """
        records = np.empty(len(indices), object)
        owners = np.searchsorted(self._ends, indices, side="right")
        for owner in np.unique(owners):
            positions = np.flatnonzero(owners == owner)
            self._read_from(int(owner), indices, positions, records)
        return self._verify(indices, records)

    def _verify(self, indices: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Compares records with the checksums in their footers, and returns their data without the footers."""
        with_footers = records.tolist()
        lengths = np.fromiter(map(len, with_footers), np.int64, len(with_footers))
        if (lengths != self._lengths[indices] + _FOOTER_BYTES).any():
            raise RecordError("its record is torn: the file ends inside it")
        footers = np.frombuffer(b"".join([record[-_FOOTER_BYTES:] for record in with_footers]), "<u4")
        data = [record[:-_FOOTER_BYTES] for record in with_footers]
        if (tfpar_ops.masked_crc32c(data) != footers).any():
            raise RecordError("its record does not match its checksum (CRC-32C)")
        records[:] = data
        return records

    def _read_from(self, owner: int, indices: np.ndarray, positions: np.ndarray, records: np.ndarray) -> None:
        """Reads the data and footers of the records of one file into `records`."""
        path = self.paths[owner]
        if not _is_local(path):
            with _open(path) as file:
                for position in positions:
                    file.seek(int(self._offsets[indices[position]]))
                    records[position] = file.read(int(self._lengths[indices[position]]) + _FOOTER_BYTES)
            return
        open_file = self._open_files[owner] if owner < len(self._open_files) else None
        file = open_file or _open_for_reads(path)
        try:
            for position in positions:
                index = indices[position]
                size = int(self._lengths[index]) + _FOOTER_BYTES
                records[position] = os.pread(file.fileno(), size, int(self._offsets[index]))
        finally:
            if open_file is None:
                file.close()


class ArrayRecordReader:
    """Reads records of ArrayRecord files by index; the files contain their own index.

    Args:
      slices: Objects with `filename`, `skip`, `take` and `examples_in_shard`, such as TFDS' file instructions.
    """

    def __init__(self, slices: Sequence[Any]):
        from array_record.python import array_record_data_source  # type: ignore[import-untyped]

        self._source = array_record_data_source.ArrayRecordDataSource(slices)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n] -> object array [n] of bytes."""
        records = np.empty(len(indices), object)
        records[:] = self._source.__getitems__([int(index) for index in indices])
        return records


def read_records(reader: RecordReader, indices: tf.Tensor) -> tf.Tensor:
    """Reads serialised records as a graph operation: int64 [n] -> string [n]."""
    records = tf.numpy_function(reader.read, [indices], tf.string, stateful=False)
    return tf.ensure_shape(records, indices.shape)


def _walk_headers(file: Any, size: int) -> tuple[list[bytes], list[int], bool]:
    """Returns the headers, the offsets of the data, and whether the last record is complete."""
    headers: list[bytes] = []
    offsets: list[int] = []
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size and isinstance(file, io.FileIO) else None
    position = 0
    while position < size:
        if view is not None:
            header = view[position : position + _HEADER.size]
        else:
            file.seek(position)
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return headers, [*offsets, position], False
        headers.append(header)
        offsets.append(position + _HEADER.size)
        position += _HEADER.size + _HEADER.unpack(header)[0] + _FOOTER_BYTES
    return headers, offsets, position == size


def _is_local(path: str) -> bool:
    return "://" not in path


def _open(path: str) -> Any:
    return _open_for_reads(path) if _is_local(path) else tf.io.gfile.GFile(path, "rb")


def _open_for_reads(path: str) -> io.FileIO:
    return open(path, "rb", buffering=0)

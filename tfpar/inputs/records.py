"""Random access to serialised records in TFRecord and ArrayRecord files.

A TFRecord file has no index, so one is made by walking over the headers: each record is
`uint64 length | uint32 masked CRC32C of the length | data | uint32 masked CRC32C of the data`.
Only headers are touched, and their checksums verified, all at once; this also finds compressed
or truncated files before the run starts. Records are then read with positioned reads, many per
call and several calls at a time: reads release the interpreter lock. The checksum of a record's
data is verified when it is read.
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
# Descriptors kept open; further files are opened anew for each batch. Well under the usual limit of 1,024 per process.
_KEPT_OPEN = 256


@dataclasses.dataclass(frozen=True)
class FileSlice:
    """`take` consecutive records of one file, beginning with record number `skip`; `take=-1` is all the rest."""

    path: str
    skip: int = 0
    take: int = -1


class RecordError(ValueError):
    """A record that is not as it was written."""


class RecordReader(Protocol):
    """Serialised examples by index over a sequence of files."""

    def read(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n] -> object array [n] of bytes."""


def scan_tfrecord(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Finds every record of an uncompressed TFRecord file.

    Args:
      path: A local path, or any address that `tf.io.gfile` opens (`gs://...`).

    Returns:
      Offsets of the records' data in the file and their lengths, int64 [records] each, in bytes.

    Raises:
      ConfigError: The file is missing, compressed, truncated, or not a TFRecord file.
    """
    try:
        with _open(path) as file:
            headers, offsets, complete = _walk_headers(file, os.stat(path).st_size if _is_local(path) else file.size())
    except (OSError, tf.errors.OpError) as error:
        raise ConfigError(f"TFRecord file {path!r} cannot be read: {error}") from error
    raw = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, _HEADER.size)
    stored = raw[:, 8:].copy().view("<u4")[:, 0]
    wrong = np.flatnonzero(stored != tfpar_ops.masked_crc32c([header[:8] for header in headers]))
    if len(wrong):
        raise ConfigError(
            f"TFRecord file {path!r}: the header of record {wrong[0]} fails its checksum. The file is damaged, "
            "compressed or not a TFRecord file; random access needs uncompressed ones. Write it again, e.g. with "
            "python -m tfpar.inputs.write."
        )
    if not complete:
        raise ConfigError(
            f"TFRecord file {path!r} ends inside record {len(offsets) - 1}: it was not written to the end."
        )
    return np.asarray(offsets, np.int64), raw[:, :8].copy().view("<u8")[:, 0].astype(np.int64)


class TFRecordReader:
    """Records of uncompressed TFRecord files by index.

    Args:
      slices: Which records of which files, in the order they are numbered.

    Raises:
      ConfigError: A file is not a sound TFRecord file or holds fewer records than a slice takes.
    """

    def __init__(self, slices: Sequence[FileSlice]):
        with concurrent.futures.ThreadPoolExecutor(_SCAN_THREADS) as pool:
            scans = list(pool.map(scan_tfrecord, [part.path for part in slices]))
        offsets, lengths, counts = [], [], []
        for part, (file_offsets, file_lengths) in zip(slices, scans, strict=True):
            stop = len(file_offsets) if part.take < 0 else part.skip + part.take
            if stop > len(file_offsets):
                raise ConfigError(
                    f"TFRecord file {part.path!r} holds {len(file_offsets)} records where {stop} are expected: it does "
                    "not belong to its index or was not copied whole."
                )
            offsets.append(file_offsets[part.skip : stop])
            lengths.append(file_lengths[part.skip : stop])
            counts.append(stop - part.skip)
        self.paths = [part.path for part in slices]
        self.records_per_file = tuple(counts)
        self._offsets = np.concatenate(offsets) if offsets else np.zeros(0, np.int64)
        self._lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        self._ends = np.cumsum(counts)
        self._kept = [_open_for_reads(path) if _is_local(path) else None for path in self.paths[:_KEPT_OPEN]]

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """int64 [n] -> object array [n] of bytes. Safe to call from several threads.

        Raises:
          RecordError: A record does not end in the file any more, or does not match its checksum.
          OSError: A file cannot be read.
        """
        records = np.empty(len(indices), object)
        owners = np.searchsorted(self._ends, indices, side="right")
        for owner in np.unique(owners):
            positions = np.flatnonzero(owners == owner)
            self._read_from(int(owner), indices, positions, records)
        return self._verified(indices, records)

    def _verified(self, indices: np.ndarray, records: np.ndarray) -> np.ndarray:
        """The data of records with their footers, whose checksums it compares."""
        whole = records.tolist()
        found = np.fromiter(map(len, whole), np.int64, len(whole))
        if (found != self._lengths[indices] + _FOOTER_BYTES).any():
            raise RecordError("its record is torn: the file ends inside it")
        footers = np.frombuffer(b"".join([record[-_FOOTER_BYTES:] for record in whole]), "<u4")
        data = [record[:-_FOOTER_BYTES] for record in whole]
        if (tfpar_ops.masked_crc32c(data) != footers).any():
            raise RecordError("its record does not match its checksum (CRC-32C)")
        records[:] = data
        return records

    def _read_from(self, owner: int, indices: np.ndarray, positions: np.ndarray, records: np.ndarray) -> None:
        """Data and footers of the records of one file."""
        path = self.paths[owner]
        if not _is_local(path):
            with _open(path) as file:
                for position in positions:
                    file.seek(int(self._offsets[indices[position]]))
                    records[position] = file.read(int(self._lengths[indices[position]]) + _FOOTER_BYTES)
            return
        kept = self._kept[owner] if owner < len(self._kept) else None
        file = kept or _open_for_reads(path)
        try:
            for position in positions:
                index = indices[position]
                size = int(self._lengths[index]) + _FOOTER_BYTES
                records[position] = os.pread(file.fileno(), size, int(self._offsets[index]))
        finally:
            if kept is None:
                file.close()


class ArrayRecordReader:
    """Records of ArrayRecord files by index; the files carry their own.

    Args:
      slices: Objects with `filename`, `skip`, `take` and `examples_in_shard`, as TFDS' file instructions are.
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
    """Serialised records as a graph operation: int64 [n] -> string [n]."""
    records = tf.numpy_function(reader.read, [indices], tf.string, stateful=False)
    return tf.ensure_shape(records, indices.shape)


def _walk_headers(file: Any, size: int) -> tuple[list[bytes], list[int], bool]:
    """Headers, offsets of the data, and whether the last record is complete."""
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

"""Checksums of TFRecord files: masked CRC-32C of many records at once.

In the native library it costs an instruction per 8 bytes. Without the library NumPy does the same work, at about a
hundredth of the speed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from tfpar_ops.library import library

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
# NumPy works on chunks of this many bytes side by side.
_CHUNK = 64


def masked_crc32c(records: Sequence[bytes]) -> np.ndarray:
    """The masked CRC-32C of every record, as TensorFlow stores it behind a record's header and behind its data.

    Safe to call from several threads; the native code lets them run side by side.

    Args:
      records: Byte strings of any length.

    Returns:
      uint32 [len(records)].
    """
    core = library().core
    if core is None:
        return _in_numpy(records)
    pointers = (ctypes.c_char_p * len(records))(*records)
    lengths = np.fromiter(map(len, records), np.int64, len(records))
    checksums = np.empty(len(records), np.uint32)
    core.tfpar_masked_crc32c(pointers, lengths.ctypes.data, len(records), checksums.ctypes.data)
    return checksums


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


def _chunk_tables() -> np.ndarray:
    """uint32 [4, 256]: what each byte of a checksum becomes when `_CHUNK` zero bytes follow it."""
    rows = np.arange(4)[:, None]
    crc = np.arange(256, dtype=np.uint32)[None, :] << (8 * rows).astype(np.uint32)
    for _ in range(_CHUNK):
        crc = _TABLE[crc & 0xFF] ^ (crc >> np.uint32(8))
    return crc


_TABLE = _byte_table()
_CHUNK_TABLES = _chunk_tables()


def _in_numpy(records: Sequence[bytes]) -> np.ndarray:
    """Remainders of all chunks of all records at once; then those of neighbours in a record are joined, in rounds.

    Zero bytes before a message leave the remainder of a register that starts at zero as it is, so that records are
    filled up in front to whole chunks, and chunks to pairs. The register starts with ones: they are added to the
    record's first four bytes.
    """
    lengths = np.fromiter(map(len, records), np.int64, len(records))
    short = lengths < 4  # the ones do not fit into the message; such records are done byte by byte
    chunks = -(-np.maximum(lengths, 1) // _CHUNK)
    filled = np.zeros(chunks.sum() * _CHUNK, np.uint8)
    for end, record in zip((np.cumsum(chunks) * _CHUNK).tolist(), records, strict=True):
        if len(record) >= 4:
            own = filled[end - len(record) : end]
            own[:] = np.frombuffer(record, np.uint8)
            own[:4] ^= 0xFF
    crc = _joined(_remainders(filled.reshape(-1, _CHUNK)), chunks)
    for position in np.flatnonzero(short):
        register = np.uint32(0xFFFFFFFF)
        for byte in records[int(position)]:
            register = _TABLE[(register ^ byte) & 0xFF] ^ (register >> np.uint32(8))
        crc[position] = register
    crc ^= np.uint32(0xFFFFFFFF)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def _remainders(parts: np.ndarray) -> np.ndarray:
    """uint32 [chunks]: the remainder of each of uint8 [chunks, _CHUNK], for a register that starts at zero."""
    remainders = np.zeros(len(parts), np.uint32)
    for column in range(_CHUNK):
        remainders = _TABLE[(remainders ^ parts[:, column]) & 0xFF] ^ (remainders >> np.uint32(8))
    return remainders


def _joined(remainders: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """uint32 [records]: the remainder of each record from those of its chunks.

    Args:
      remainders: uint32 [sum of chunks], one record after the other.
      chunks: int64 [records], at least 1 each: the number of chunks of each record.
    """
    tables = _CHUNK_TABLES
    while chunks.max(initial=1) > 1:
        odd = chunks % 2
        pairs = np.zeros(chunks.sum() + odd.sum(), np.uint32)
        pairs[np.arange(len(remainders)) + np.repeat(np.cumsum(odd), chunks)] = remainders
        remainders = _shifted(pairs[::2], tables) ^ pairs[1::2]
        tables, chunks = _shifted(tables, tables), (chunks + odd) // 2  # of twice as many zero bytes
    return remainders


def _shifted(crc: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """What checksums become when the zero bytes of `tables`, as of `_chunk_tables`, follow."""
    return functools.reduce(np.bitwise_xor, [tables[byte][crc >> np.uint32(8 * byte) & 0xFF] for byte in range(4)])

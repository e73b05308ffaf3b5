"""Checksums of TFRecord files: masked CRC-32C of many records at once.

In the native library it costs an instruction per 8 bytes. Without the library NumPy does the same work, at about a
hundredth of the speed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from tfpar_ops.library import library

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
# NumPy works on this many bytes of every record side by side.
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
    """Remainders of all chunks of all records at once; then each record's are joined, chunk after chunk.

    Zero bytes before a message leave the remainder of a register that starts at zero as it is, so that records are
    filled up in front to whole chunks. The register starts with ones: they are added to the record's first four bytes.
    """
    lengths = np.array([len(record) for record in records], np.int64)
    chunks = max(1, -(-int(np.maximum(lengths, 4).max(initial=0)) // _CHUNK))
    rows = np.zeros([len(records), chunks * _CHUNK], np.uint8)
    short = lengths < 4  # the ones do not fit into the message; such records are done byte by byte
    for row, record in zip(rows, records, strict=True):
        if len(record) >= 4:
            row[-len(record) :] = np.frombuffer(record, np.uint8)
            row[len(row) - len(record) :][:4] ^= 0xFF
    parts = rows.reshape(len(records), chunks, _CHUNK)
    remainders = np.zeros([len(records), chunks], np.uint32)
    for column in range(_CHUNK):
        remainders = _TABLE[(remainders ^ parts[:, :, column]) & 0xFF] ^ (remainders >> np.uint32(8))
    crc = np.zeros(len(records), np.uint32)
    for chunk in range(chunks):
        shifted = [_CHUNK_TABLES[byte][crc >> np.uint32(8 * byte) & 0xFF] for byte in range(4)]
        crc = shifted[0] ^ shifted[1] ^ shifted[2] ^ shifted[3] ^ remainders[:, chunk]
    for position in np.flatnonzero(short):
        register = np.uint32(0xFFFFFFFF)
        for byte in records[int(position)]:
            register = _TABLE[(register ^ byte) & 0xFF] ^ (register >> np.uint32(8))
        crc[position] = register
    crc ^= np.uint32(0xFFFFFFFF)
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)

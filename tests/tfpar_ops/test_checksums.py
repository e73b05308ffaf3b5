"""Checksums of records: TensorFlow's own, from the library and from NumPy."""

from __future__ import annotations

import os
import struct
import tracemalloc

import tfpar_ops
from tfpar_ops import checksums, library

import numpy as np
import pytest
import tensorflow as tf

LENGTHS = [*range(140), 1000, 4096, 70_001]


def stored(records: list[bytes], path) -> list[int]:
    """What TensorFlow writes behind each record."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    content, position, found = path.read_bytes(), 0, []
    for record in records:
        position += 12 + len(record)
        found.append(struct.unpack_from("<I", content, position)[0])
        position += 4
    return found


@pytest.mark.parametrize("implementation", ["native", "numpy"])
def test_checksums_are_those_of_tensorflow(implementation, tmp_path, monkeypatch):
    if implementation == "numpy":
        monkeypatch.setattr(library, "_library", library.Library(None, "for this test"))
    elif library.library().core is None:
        pytest.skip("the native library is not built here")
    records = [os.urandom(length) for length in LENGTHS]
    found = tfpar_ops.masked_crc32c(records)
    assert found.dtype == np.uint32
    assert found.tolist() == stored(records, tmp_path / "records")
    assert tfpar_ops.masked_crc32c([]).tolist() == []
    for record in (b"", b"ab", b"abcdefgh" * 40):  # alone, too: what others have beside it does not matter
        assert checksums.masked_crc32c([record]).tolist() == stored([record], tmp_path / "one")


def test_a_long_record_makes_the_others_no_longer(tmp_path):
    """Without the native library. What is allocated shows it: the time depends on the machine."""
    records = [os.urandom(length) for length in (*range(60, 130), 200_000, *range(60, 130))]
    tracemalloc.start()
    try:
        found = checksums._in_numpy(records)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.tolist() == stored(records, tmp_path / "records")
    assert peak < 4 * sum(map(len, records))

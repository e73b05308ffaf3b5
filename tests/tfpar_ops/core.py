"""The native library through its C interface (`core/codec.h`): what the operations call, without TensorFlow around it.

An operation is made anew for every length, which takes a millisecond; here a call takes microseconds, so that tests can
go through thousands of lengths.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Sequence

import tfpar_ops
from tfpar_ops.codecs import Codec
from tfpar_ops.library import FILE

import numpy as np
import pytest

_FLOATS = ctypes.POINTER(ctypes.c_float)


class _Codec(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "block", "keep", "scale_bits", "stochastic")),
        *((name, ctypes.c_uint64) for name in ("seed", "step")),
    )


class _Vector(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(_FLOATS)),
        ("offset", ctypes.POINTER(ctypes.c_int64)),
        ("parts", ctypes.c_int64),
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library, whether or not its operations are in use."""
    library = ctypes.CDLL(str(pathlib.Path(tfpar_ops.__file__).with_name(FILE)))
    codec, vector, pointer, number = ctypes.POINTER(_Codec), ctypes.POINTER(_Vector), ctypes.c_void_p, ctypes.c_int64
    library.tfpar_payload_bytes.argtypes = [codec, number]
    library.tfpar_payload_bytes.restype = number
    library.tfpar_num_blocks.argtypes = [codec, number]
    library.tfpar_num_blocks.restype = number
    library.tfpar_payload_check.argtypes = [codec, number, pointer, number, ctypes.c_char_p, ctypes.c_size_t]
    library.tfpar_write_frame.argtypes = [codec, number, pointer]
    library.tfpar_write_frame.restype = None
    library.tfpar_encode.argtypes = [codec, vector, *[number] * 2, *[pointer] * 3, *[number] * 2, pointer]
    library.tfpar_encode.restype = None
    library.tfpar_decode_sum.argtypes = [codec, number, pointer, number, ctypes.c_float, vector, *[number] * 3]
    return library


def get() -> ctypes.CDLL:
    """The library; skips the test where it was not built."""
    if not tfpar_ops.uses_library():
        pytest.skip(f"the native library is not in use here: {tfpar_ops.library_status()}")
    return load()


def encode(
    arrays: Sequence[np.ndarray], residual: np.ndarray, codec: Codec, seed: int = 0, step: int = 0
) -> tuple[bytes, np.ndarray]:
    """Payload and new residual of float32 arrays, laid end to end."""
    library, options = get(), _options(codec, seed, step)
    elements = sum(map(len, arrays))
    payload = np.full(library.tfpar_payload_bytes(options, elements), 0xAB, np.uint8)
    left = np.full(elements, np.nan, np.float32)
    blocks = library.tfpar_num_blocks(options, elements)
    x = _vector(arrays)
    library.tfpar_write_frame(options, elements, payload.ctypes.data)
    library.tfpar_encode(
        options, x, 0, elements, residual.ctypes.data, left.ctypes.data, payload.ctypes.data, 0, blocks, None
    )
    return payload.tobytes(), left


def decode_sum(payloads: Sequence[bytes], codec: Codec, elements: int) -> np.ndarray:
    """Sum of payloads of so many elements."""
    library, options = get(), _options(codec, 0, 0)
    message = ctypes.create_string_buffer(256)
    for payload in payloads:
        wrong = library.tfpar_payload_check(options, elements, payload, len(payload), message, len(message))
        assert not wrong, message.value
    rows = (ctypes.c_char_p * len(payloads))(*payloads)
    out = np.full(elements, np.nan, np.float32)
    blocks = library.tfpar_num_blocks(options, elements)
    assert not library.tfpar_decode_sum(options, elements, rows, len(payloads), 1.0, _vector([out]), 0, 0, blocks)
    return out


def _options(codec: Codec, seed: int, step: int) -> _Codec:
    scale_bits = {"bf16": 16, "float32": 32}[codec.scale] if codec.has_scale else 0
    stochastic = codec.rounding == "stochastic"
    return _Codec(codec.format.number, codec.block, codec.keep, scale_bits, stochastic, seed, step)


def _vector(arrays: Sequence[np.ndarray]) -> _Vector:
    data = (_FLOATS * len(arrays))(*(array.ctypes.data_as(_FLOATS) for array in arrays))
    offsets = np.cumsum([0, *map(len, arrays)])
    return _Vector(data, (ctypes.c_int64 * len(offsets))(*offsets.tolist()), len(arrays))

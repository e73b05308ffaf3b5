"""The codecs' C interface on buffers of its own, as `codecs.py` measures it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import tfpar_ops
from tfpar_ops import Codec

import numpy as np


class _Options(ctypes.Structure):
    """tfpar_codec of codec.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "block", "keep", "scale_bits", "stochastic")),
        *((name, ctypes.c_uint64) for name in ("seed", "step")),
    ]


class _Vector(ctypes.Structure):
    """tfpar_vector, of one part."""

    _fields_ = [
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("offset", ctypes.POINTER(ctypes.c_int64)),
        ("parts", ctypes.c_int64),
    ]


def aligned(elements: int, dtype: type = np.float32) -> np.ndarray:
    """Zeros at a multiple of 64 bytes, where TensorFlow allocates too, their pages already there."""
    size = elements * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    memory[:] = 0
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype)


def gradient(elements: int, seed: int = 0) -> np.ndarray:
    """Numbers such as a gradient has."""
    values = aligned(elements)
    values[:] = np.random.default_rng(seed).standard_normal(elements, np.float32) * np.float32(1e-3)
    return values


class Core:
    """The library's C interface on buffers of its own, for one codec and length."""

    def __init__(self, codec: Codec, elements: int, peers: int) -> None:
        path = Path(tfpar_ops.__file__).with_name("libtfpar_ops.so")
        self._library = ctypes.CDLL(str(path))
        scale_bits = 8 * codec.scale_bytes if codec.has_scale else 0
        stochastic = int(codec.rounding == "stochastic")
        self._options = _Options(codec.format.number, codec.block, codec.keep, scale_bits, stochastic)
        self._elements, self._peers, self.blocks = elements, peers, codec.blocks(elements)
        self._x, self._residual, self._sum = gradient(elements), aligned(elements), aligned(elements)
        self._payloads = [aligned(codec.payload_bytes(elements), np.uint8) for _ in range(peers)]
        self._rows = (ctypes.c_void_p * peers)(*(payload.ctypes.data for payload in self._payloads))
        self._offset = (ctypes.c_int64 * 2)(0, elements)
        for payload in self._payloads:
            self._library.tfpar_write_frame(
                ctypes.byref(self._options), ctypes.c_int64(elements), ctypes.c_void_p(payload.ctypes.data)
            )
            self._encode(payload)(0, self.blocks)

    def _vector(self, values: np.ndarray) -> _Vector:
        return _Vector((ctypes.c_void_p * 1)(values.ctypes.data), self._offset, 1)

    def _encode(self, payload: np.ndarray) -> Callable[[int, int], None]:
        function, x = self._library.tfpar_encode, self._vector(self._x)
        function.restype, integer, pointer = None, ctypes.c_int64, ctypes.c_void_p
        function.argtypes = [pointer, pointer, integer, integer, pointer, pointer, pointer, integer, integer, pointer]
        residual = self._residual.ctypes.data
        fixed = (
            ctypes.byref(self._options),
            ctypes.byref(x),
            0,
            self._elements,
            residual,
            residual,
            payload.ctypes.data,
        )
        return lambda first, last: function(*fixed, first, last, None)

    def encode(self) -> Callable[[int, int], None]:
        """Encodes blocks [first, last) with the residual in place."""
        return self._encode(self._payloads[0])

    def decode_sum(self) -> Callable[[int, int], None]:
        """Decodes and sums blocks [first, last) of all peers."""
        function, out = self._library.tfpar_decode_sum, self._vector(self._sum)
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        function.argtypes = [pointer, integer, pointer, integer, ctypes.c_float, pointer, integer, integer, integer]
        fixed = (ctypes.byref(self._options), self._elements, self._rows, self._peers, 0.25, ctypes.byref(out), 0)
        return lambda first, last: function(*fixed, first, last)

    def triad(self) -> Callable[[int, int], None]:
        """y = a * x + y for the elements of blocks [first, last)."""
        function, block = self._library.tfpar_triad, self._options.block
        function.restype, pointer = None, ctypes.c_void_p
        function.argtypes = [ctypes.c_float, pointer, pointer, ctypes.c_int64]
        x, y = self._x.ctypes.data, self._sum.ctypes.data

        def call(first: int, last: int) -> None:
            begin, end = min(first * block, self._elements), min(last * block, self._elements)
            function(1e-6, x + 4 * begin, y + 4 * begin, end - begin)

        return call

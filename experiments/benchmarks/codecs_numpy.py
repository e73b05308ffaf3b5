"""The codecs as one would write them by hand in NumPy, which `codecs.py` measures beside tfpar's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpar_ops import Codec

import ml_dtypes
import numpy as np

_CASTS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def numpy_operations(codec: Codec, gradient: np.ndarray, peers: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The two operations as one would write them by hand: much the same arithmetic, other bits."""
    blocks = codec.blocks(gradient.size)
    x = np.zeros([blocks, codec.block], np.float32)
    x.reshape(-1)[: gradient.size] = gradient
    residual = np.zeros_like(x)
    rng = np.random.default_rng(0)

    def encode_with_residual() -> Any:
        v = x + residual
        stored = numpy_encode(codec, v, rng)
        np.subtract(v, numpy_decode(codec, *stored), out=residual)
        return stored

    payloads = [encode_with_residual() for _ in range(peers)]

    def decode_and_sum() -> np.ndarray:
        total = numpy_decode(codec, *payloads[0])
        for payload in payloads[1:]:
            total += numpy_decode(codec, *payload)
        total *= np.float32(0.25)
        return total

    return encode_with_residual, decode_and_sum


def numpy_encode(codec: Codec, v: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales (for topk: positions) of float32 [blocks, block]."""
    none = np.zeros([len(v), 0], np.float32)
    if codec.kind in _CASTS:
        return v.astype(_CASTS[codec.kind]), none
    if codec.kind == "topk":
        positions = np.argpartition(np.abs(v), -codec.keep, axis=1)[:, -codec.keep :].astype(np.uint16)
        return np.take_along_axis(v, positions.astype(np.int64), 1).astype(ml_dtypes.bfloat16), positions
    if codec.kind == "sign":
        return np.packbits(v < 0, axis=1), np.mean(np.abs(v), axis=1, keepdims=True)
    largest = 448 if codec.kind == "fp8" else (1 << (codec.format.code_bits - 1)) - 1
    scale = np.maximum(np.abs(v).max(axis=1, keepdims=True) / np.float32(largest), np.float32(2.0**-126))
    t = v / scale
    if codec.kind == "fp8":
        return t.astype(ml_dtypes.float8_e4m3fn), scale
    t = np.floor(t + rng.random(t.shape, np.float32)) if codec.rounding == "stochastic" else np.rint(t)
    q = np.clip(t, -largest, largest).astype(np.int8)
    if codec.format.code_bits == 8:
        return q, scale
    codes = (q + (1 << (codec.format.code_bits - 1))).astype(np.uint8)
    planes = np.split(codes, 8 // codec.format.code_bits, axis=1)
    packed = planes[0]
    for number, plane in enumerate(planes[1:], 1):
        packed = packed | plane << np.uint8(number * codec.format.code_bits)
    return packed, scale


def numpy_decode(codec: Codec, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [blocks, block] of what `encode` made."""
    if codec.kind in _CASTS:
        return codes.astype(np.float32)
    if codec.kind == "topk":
        out = np.zeros([len(codes), codec.block], np.float32)
        np.put_along_axis(out, scales.astype(np.int64), codes.astype(np.float32), 1)
        return out
    if codec.kind == "sign":
        return (1 - 2 * np.unpackbits(codes, axis=1).astype(np.float32)) * scales
    if codec.kind == "fp8" or codec.format.code_bits == 8:
        return codes.astype(np.float32) * scales
    mask, middle = np.uint8((1 << codec.format.code_bits) - 1), np.float32(1 << (codec.format.code_bits - 1))
    planes = [codes >> np.uint8(place) & mask for place in range(0, 8, codec.format.code_bits)]
    return (np.concatenate(planes, axis=1).astype(np.float32) - middle) * scales

"""FORMAT.md once more, in NumPy and Python integers, block by block: slow and obvious.

Of `tfpar_ops` it uses the options of a `Codec` alone. Where the implementations work on bit patterns this works on
values: roundings come from `rint` of scaled numbers, NumPy's half precision, and a table of all E4M3 values.
"""

from __future__ import annotations

import functools
import struct

from tfpar_ops.codecs import Codec

import numpy as np

# Number in the header and bits of a code; a line for each, so that two formats can be added at once.
TABLE = {
    "bf16": (1, 16),
    "fp16": (2, 16),
    "fp8": (3, 8),
    "int8": (4, 8),
    "int4": (5, 4),
    "int2": (6, 2),
    "sign": (7, 1),
    "topk": (8, 32),
}
KIND = {name: number for name, (number, _) in TABLE.items()}
CODE_BITS = {name: bits for name, (_, bits) in TABLE.items()}
INTEGERS = ("int8", "int4", "int2")
TINY = np.float32(2.0**-126)
NAN = np.float32("nan")


class InvalidPayloadError(ValueError):
    """A position in a topk payload that is not below the block size."""


# Arithmetic


def flush(v: np.ndarray) -> np.ndarray:
    """+0 where |v| < 2^-126, and for -0."""
    return np.where(np.abs(v) < TINY, np.float32(0), v)


def without_denormals(v: np.ndarray) -> np.ndarray:
    """Zeros of the same sign where |v| < 2^-126."""
    return np.where(np.abs(v) < TINY, np.copysign(np.float32(0), v), v)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return without_denormals(without_denormals(a) + without_denormals(b))


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return without_denormals(without_denormals(a) * without_denormals(np.float32(b)))


def significant(v: np.ndarray, digits: int, largest: float) -> np.ndarray:
    """Finite v to so many binary digits, nearest even; saturates."""
    fraction, exponent = np.frexp(v.astype(np.float64))
    rounded = np.ldexp(np.rint(np.ldexp(fraction, digits)), exponent - digits)
    return np.clip(rounded, -largest, largest).astype(np.float32)


BF16_LARGEST = (2 - 2.0**-7) * 2.0**127
SHORT_LARGEST = (2 - 2.0**-16) * 2.0**127


def bf16_codes(v: np.ndarray) -> np.ndarray:
    finite = np.isfinite(v)
    rounded = significant(np.where(finite, v, 0), 8, BF16_LARGEST)
    return np.where(finite, rounded.view(np.uint32) >> 16, 0x7FC0).astype(np.uint16)


def bf16_values(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def fp16_codes(v: np.ndarray) -> np.ndarray:
    finite = np.isfinite(v)
    half = np.clip(np.where(finite, v, 0), -65504, 65504).astype(np.float16)
    return np.where(finite, half.view(np.uint16), 0x7E00).astype(np.uint16)


def e4m3(code: int) -> float:
    """The value of one code, from the definition of the format."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3(code) for code in range(256)])
E4M3_MIDDLES = (E4M3[:126] + E4M3[1:127]) / 2  # between the values of codes i and i + 1


def e4m3_codes(t: np.ndarray) -> np.ndarray:
    """Nearest codes of |t| <= 448; of two equally near ones, the even code."""
    size = np.abs(t)
    below, above = np.searchsorted(E4M3_MIDDLES, size, "left"), np.searchsorted(E4M3_MIDDLES, size, "right")
    code = np.where(below % 2 == 0, below, above)
    return np.where(code == 0, 0, code + np.where(t < 0, 128, 0)).astype(np.uint8)


def scale_bytes(codec: Codec, s: np.float32) -> bytes:
    """A finite scale as it is stored."""
    digits, largest = (8, BF16_LARGEST) if codec.scale == "bf16" else (17, SHORT_LARGEST)
    scale = np.float32(min(significant(s, digits, largest), np.float32(2.0**126)))
    if scale <= TINY:
        scale = np.float32(0)
    return scale.tobytes()[2:] if codec.scale == "bf16" else scale.tobytes()


def scale_value(codec: Codec, stored: bytes) -> np.float32:
    padded = b"\0\0" + stored if codec.scale == "bf16" else stored
    return flush(np.frombuffer(padded, "<f4"))[0]


def nan_scale(codec: Codec) -> bytes:
    return b"\xc0\x7f" if codec.scale == "bf16" else b"\0\0\xc0\x7f"


# Random numbers


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10, Salmon et al. 2011, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@functools.lru_cache(maxsize=4096)
def offsets(block: int, number: int, seed: int, step: int) -> np.ndarray:
    """u of every element of a block; `number` counts blocks from the start of the whole vector."""
    lanes = block // 8
    u = np.zeros(block, np.int64)
    for lane in range(lanes):
        c = number * lanes + lane
        counter = (c & 0xFFFFFFFF, c >> 32, step & 0xFFFFFFFF, step >> 32)
        words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
        for i in range(8):
            u[lane + i * lanes] = (words[i // 2] >> (16 * (i % 2))) & 0xFFFF
    return u


# Blocks


def planes(codes: np.ndarray, width: int) -> bytes:
    """Byte j holds elements j, j + m, j + 2m, ..., the first in the lowest bits."""
    m = len(codes) * width // 8
    out = np.zeros(m, np.uint8)
    for plane in range(8 // width):
        out |= (codes[plane * m : (plane + 1) * m].astype(np.uint8) & ((1 << width) - 1)) << (plane * width)
    return out.tobytes()


def unplanes(data: bytes, width: int) -> np.ndarray:
    raw = np.frombuffer(data, np.uint8)
    parts = [(raw >> (plane * width)) & ((1 << width) - 1) for plane in range(8 // width)]
    return np.concatenate(parts).astype(np.int64)


def encode_block(codec: Codec, v: np.ndarray, existing: int, number: int, seed: int, step: int) -> tuple[bytes, bytes]:
    """Code bytes and scale bytes of one block of flushed values, of which the first `existing` are not padding."""
    if codec.kind == "bf16":
        return bf16_codes(v).astype("<u2").tobytes(), b""
    if codec.kind == "fp16":
        return fp16_codes(v).astype("<u2").tobytes(), b""
    if codec.kind == "fp8":
        return encode_fp8(v)
    if codec.kind in INTEGERS:
        u = offsets(codec.block, number, seed, step) if codec.rounding == "stochastic" else None
        return encode_integers(codec, v, u)
    if codec.kind == "sign":
        return encode_sign(codec, v, existing)
    return encode_topk(codec, v), b""


def encode_fp8(v: np.ndarray) -> tuple[bytes, bytes]:
    a = np.max(np.abs(v))
    if not a <= 448 * 2.0**119:
        return bytes(len(v)), b"\xff"
    if a == 0:
        return bytes(len(v)), b"\0"
    fraction, exponent = np.frexp(float(a))  # a = fraction 2^exponent, fraction in [0.5, 1)
    e = max(int(exponent) - 1 - 8 + (fraction > 0.875), -126)
    return e4m3_codes(np.ldexp(v.astype(np.float64), -e)).tobytes(), bytes([e + 127])


def encode_integers(codec: Codec, v: np.ndarray, u: np.ndarray | None) -> tuple[bytes, bytes]:
    bits = CODE_BITS[codec.kind]
    levels = {8: 127, 4: 7, 2: 1}[bits]
    zero = {8: 0, 4: 8, 2: 2}[bits]
    a = np.max(np.abs(v))
    if not np.isfinite(a):
        return planes(np.full(len(v), zero), bits), nan_scale(codec)
    stored = scale_bytes(codec, multiply(a, np.float32(1) / np.float32(levels)))
    scale = scale_value(codec, stored)
    ratio = multiply(v, np.float32(1) / scale) if scale else np.zeros_like(v)
    q = np.rint(ratio) if u is None else np.floor((np.rint(multiply(ratio, 65536.0)).astype(np.float64) + u) / 65536)
    return planes(np.clip(q.astype(np.int64), -levels, levels) + zero, bits), stored


def encode_sign(codec: Codec, v: np.ndarray, existing: int) -> tuple[bytes, bytes]:
    total = np.abs(v)
    while len(total) > 1:
        with np.errstate(over="ignore", invalid="ignore"):
            total = total[: len(total) // 2] + total[len(total) // 2 :]
    if not np.isfinite(total[0]):
        return planes(v < 0, 1), nan_scale(codec)
    return planes(v < 0, 1), scale_bytes(codec, multiply(total[0], np.float32(1) / np.float32(max(existing, 1))))


def encode_topk(codec: Codec, v: np.ndarray) -> bytes:
    if np.all(np.isfinite(v)):
        positions = np.sort(np.argsort(-np.abs(v), kind="stable")[: codec.keep])
        values = bf16_codes(v[positions])
    else:
        positions, values = np.arange(codec.keep), np.full(codec.keep, 0x7FC0)
    return positions.astype("<u2").tobytes() + values.astype("<u2").tobytes()


def decode_block(codec: Codec, codes: bytes, scale: bytes) -> np.ndarray:
    """Values of one block."""
    if codec.kind == "bf16":
        return bf16_values(np.frombuffer(codes, "<u2"))
    if codec.kind == "fp16":
        return np.frombuffer(codes, "<f2").astype(np.float32)
    if codec.kind == "fp8":
        if scale == b"\xff":
            return np.full(codec.block, NAN)
        power = 0.0 if scale == b"\0" else 2.0 ** (scale[0] - 127)
        with np.errstate(over="ignore"):
            return flush((E4M3[np.frombuffer(codes, np.uint8)] * power).astype(np.float32))
    if codec.kind in INTEGERS:
        return multiply(integers(codec, codes).astype(np.float32), scale_value(codec, scale))
    if codec.kind == "sign":
        value = scale_value(codec, scale)
        return np.where(unplanes(codes, 1) == 1, -value, value) if value != 0 else np.zeros(codec.block, np.float32)
    return decode_topk(codec, codes)


def integers(codec: Codec, codes: bytes) -> np.ndarray:
    if codec.kind == "int8":
        return np.frombuffer(codes, np.int8).astype(np.int64)
    return unplanes(codes, CODE_BITS[codec.kind]) - {"int4": 8, "int2": 2}[codec.kind]


def decode_topk(codec: Codec, codes: bytes) -> np.ndarray:
    halves = np.frombuffer(codes, "<u2")
    positions, values = halves[: codec.keep], bf16_values(halves[codec.keep :])
    if np.any(positions >= codec.block):
        raise InvalidPayloadError
    if np.isnan(values[0]):
        return np.full(codec.block, NAN)
    out = np.zeros(codec.block, np.float32)
    if len(np.unique(positions)) == codec.keep:
        out[positions] = add(out[positions], values)
        return out
    for position, value in zip(positions, values, strict=True):
        out[position] = add(out[position], value)
    return out


# Vectors


def header(codec: Codec, n: int) -> bytes:
    kind = KIND[codec.kind] + (128 if codec.scale == "float32" else 0)
    return b"TFP\x01" + struct.pack("<BBHQ", kind, int(np.log2(codec.block)), codec.keep, n)


def code_size(codec: Codec) -> int:
    return (codec.keep if codec.kind == "topk" else codec.block) * CODE_BITS[codec.kind] // 8


def scale_size(codec: Codec) -> int:
    if codec.kind in (*INTEGERS, "sign"):
        return 2 if codec.scale == "bf16" else 4
    return int(codec.kind == "fp8")


def frame(codec: Codec, n: int, blocks: list[tuple[bytes, bytes]]) -> bytes:
    """The payload of n elements from code and scale bytes of its blocks."""
    body = header(codec, n) + b"".join(codes for codes, _ in blocks) + b"".join(scale for _, scale in blocks)
    return body + bytes(-len(body) % 16)


def encode(
    codec: Codec,
    x: np.ndarray,
    residual: np.ndarray | None = None,
    n: int | None = None,
    begin: int = 0,
    seed: int = 0,
    step: int = 0,
) -> tuple[bytes, np.ndarray | None]:
    """Payload of n elements, of which x gives the first and padding the rest, and new residual."""
    n = len(x) if n is None else n
    count = -(-n // codec.block)
    v = np.zeros(count * codec.block, np.float32)
    v[: len(x)] = flush(x) if residual is None else flush(add(x, residual))
    blocks, decoded = [], [np.zeros(0, np.float32)]
    for i in range(count):
        existing = min(max(len(x) - i * codec.block, 0), codec.block)
        part = v[i * codec.block : (i + 1) * codec.block]
        blocks.append(encode_block(codec, part, existing, begin // codec.block + i, seed, step))
        decoded.append(decode_block(codec, *blocks[-1]))
    payload = frame(codec, n, blocks)
    if residual is None:
        return payload, None
    return payload, new_residual(v[: len(x)], np.concatenate(decoded)[: len(x)], residual)


def new_residual(v: np.ndarray, decoded: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """What is left of v; the old residual, bit for bit, where v decodes to NaN."""
    with np.errstate(invalid="ignore"):
        lost = flush(v - decoded)
    return np.where(np.isnan(decoded), residual.view(np.uint32), lost.view(np.uint32)).view(np.float32)


def decode(codec: Codec, payload: bytes, n: int) -> np.ndarray:
    """n values."""
    assert payload[:16] == header(codec, n)
    count, size, scale = -(-n // codec.block), code_size(codec), scale_size(codec)
    scales_at = 16 + count * size
    out = [np.zeros(0, np.float32)]
    for i in range(count):
        codes = payload[16 + i * size : 16 + (i + 1) * size]
        out.append(decode_block(codec, codes, payload[scales_at + i * scale : scales_at + (i + 1) * scale]))
    return np.concatenate(out)[:n]


def decode_sum(codec: Codec, payloads: list[bytes], n: int, factor: float = 1.0) -> np.ndarray:
    total = decode(codec, payloads[0], n)
    for payload in payloads[1:]:
        total = add(total, decode(codec, payload, n))
    product = multiply(total, np.float32(factor))
    return total if factor == 1 else np.where(np.abs(product) <= TINY, np.float32(0), product)


def recode(
    codec: Codec,
    payloads: list[bytes],
    residual: np.ndarray | None,
    n: int,
    *,
    factor: float = 1.0,
    begin: int = 0,
    valid: int | None = None,
    seed: int = 0,
    step: int = 0,
) -> tuple[bytes, np.ndarray | None]:
    total = decode_sum(codec, payloads, n, factor)[: n if valid is None else valid]
    return encode(codec, total, residual, n, begin, seed, step)

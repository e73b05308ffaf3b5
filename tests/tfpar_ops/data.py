"""Codecs and vectors to test with: numbers that a codec might get wrong, such that hypothesis can choose and repeat."""

from __future__ import annotations

import dataclasses

from tfpar_ops.codecs import Codec
from tfpar_ops.formats import FORMATS

import numpy as np
from hypothesis import strategies as st

CODECS = [
    Codec("bf16"),
    Codec("fp16"),
    Codec("fp8", block=64),
    Codec("fp8"),
    Codec("int8"),
    Codec("int8", block=64, scale="float32", rounding="stochastic"),
    Codec("int4"),
    Codec("int4", block=128, scale="float32"),
    Codec("int4", block=64, rounding="stochastic"),
    Codec("int2", block=64),
    Codec("int2", block=256, scale="float32", rounding="stochastic"),
    Codec("sign", block=64),
    Codec("sign", scale="float32"),
    Codec("topk", block=64, keep=1),
    Codec("topk", block=128, keep=13),
    Codec("topk", block=64, keep=64),
    Codec("topk", keep=41),
]
# Those of formats that this list does not name.
_NAMED = {codec.kind for codec in CODECS}
CODECS += [Codec(kind, keep=5 * entry.keeps) for kind, entry in FORMATS.items() if kind not in _NAMED]
# One of each kind, for what takes long.
KINDS = list({codec.kind: codec for codec in reversed(CODECS)}.values())[::-1]
STOCHASTIC = [codec for codec in CODECS if codec.rounding == "stochastic"]

SPECIAL = np.array(
    [
        *(0.0, -0.0, 1.0, -1.0, 448.0, 464.0, 65504.0, 65519.99, 65520.0, 127.0, 7.0, 0.5, 1.5),
        *(2.0**-126, -(2.0**-126), 2.0**-125, 2.0**-24, 2.0**-25, 2.0**-14, 2.0**126, -(2.0**127)),
        *(2.0**-149, -(2.0**-130), np.finfo(np.float32).max, -np.finfo(np.float32).max),
    ],
    np.float32,
)
NOT_FINITE = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001], np.uint32).view(np.float32)
FLAVOURS = ("normal", "grid", "ties", "wide", "tiny", "huge", "special", "zeros")


def identifier(codec: Codec) -> str:
    """Short name of a codec for the test report."""
    parts = [codec.kind, str(codec.block)]
    parts += [f"keep{codec.keep}"] * bool(codec.keep) + [codec.scale] * codec.has_scale
    return "-".join(parts + ["stochastic"] * (codec.rounding == "stochastic"))


def values(n: int, flavour: str, seed: int) -> np.ndarray:
    """n finite float32 numbers."""
    rng = np.random.default_rng(seed)
    sign = rng.choice(np.array([-1, 1], np.float32), n)
    if flavour == "normal":
        return (rng.normal(size=n) * 1e-3).astype(np.float32)
    if flavour == "grid":
        # Half steps of every quantiser whose largest is 127, 7 or 1 power of two: each rounding is exact or a tie.
        top = rng.choice([127, 7, 1])
        steps = rng.integers(0, 2 * top + 1, n) / 2
        steps[::64] = top
        return (sign * steps * 2.0 ** rng.integers(-20, 20)).astype(np.float32)
    if flavour == "ties":
        # Middles between two bf16, half or E4M3 numbers, and their neighbours.
        dropped = rng.choice([16, 13, 20, 7], n)
        middle = (rng.integers(0, 1 << 23, n) >> dropped << dropped) + (1 << (dropped - 1)) + rng.integers(-1, 2, n)
        return sign * np.ldexp(1 + middle / 2.0**23, rng.integers(-12, 4, n)).astype(np.float32)
    if flavour == "zeros":
        return (sign * (rng.random(n) < 0.02)).astype(np.float32)
    if flavour == "special":
        return rng.choice(SPECIAL, n)
    low, high = {"wide": (0, 255), "tiny": (0, 14), "huge": (240, 255)}[flavour]
    exponents = rng.integers(low, high, n, dtype=np.uint32)
    mantissas = rng.integers(0, 1 << 23, n, dtype=np.uint32)
    return sign * ((exponents << 23) | mantissas).view(np.float32)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """How to fill vectors, whatever their length."""

    flavour: str
    seed: int
    not_finite: int = 0

    def fill(self, n: int, stream: int = 0) -> np.ndarray:
        """n numbers; other streams have others, and the same number that are not finite."""
        vector = values(n, self.flavour, self.seed + 1_000_003 * stream)
        rng = np.random.default_rng(self.seed + stream)
        if n:
            places = rng.integers(0, n, self.not_finite)
            vector.view(np.uint32)[places] = rng.choice(NOT_FINITE.view(np.uint32), self.not_finite)
        return vector


def numbers(flavours: tuple[str, ...] = FLAVOURS, not_finite: int = 2) -> st.SearchStrategy[Numbers]:
    """Any numbers, of which at most a few are not finite."""
    return st.builds(Numbers, st.sampled_from(flavours), st.integers(0, 2**31), st.integers(0, not_finite))


def lengths(codec: Codec) -> st.SearchStrategy[int]:
    """Lengths of a few blocks, often next to a multiple of the block size."""
    near = st.builds(lambda blocks, off: max(blocks * codec.block + off, 0), st.integers(0, 3), st.integers(-2, 2))
    return st.one_of(near, st.integers(0, 3 * codec.block))


def cut(vector: np.ndarray, places: list[float]) -> list[np.ndarray]:
    """A vector in parts, at these fractions of its length; some may be empty."""
    return np.split(vector, sorted(int(place * len(vector)) for place in places))


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Asserts equal bits; of NaN, that both are one."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    differ = (actual.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(actual) & np.isnan(expected))
    where = np.flatnonzero(differ)[:4]
    message = f"{np.sum(differ)} of {differ.size} differ: at {where}, {actual.flat[where]}, not {expected.flat[where]}"
    assert not len(where), message


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Asserts equal bits, those of NaN too."""
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))

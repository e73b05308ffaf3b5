"""What a codec is: its options, and the payload length that follows from them. `FORMAT.md` has the formats."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import struct

KINDS = ("bf16", "fp16", "fp8", "quantize", "sign", "topk")
SCALES = ("bf16", "float32")
ROUNDINGS = ("nearest", "stochastic")

HEADER_BYTES = 16
MAGIC = b"TFP\x01"
CAST_BLOCK = 1024
GPU_PEERS = 64  # payloads that one operation adds up on a GPU, at most: TFPAR_CUDA_MAX_PEERS of core/cuda/codec_cuda.h

# Kind and bits, numbered as in the header.
_FORMATS = (
    ("bf16", 0),
    ("fp16", 0),
    ("fp8", 0),
    ("quantize", 8),
    ("quantize", 4),
    ("quantize", 2),
    ("sign", 0),
    ("topk", 0),
)
_NUMBERS = {kind_and_bits: number for number, kind_and_bits in enumerate(_FORMATS, start=1)}
_DEFAULT_BLOCK = {"bf16": CAST_BLOCK, "fp16": CAST_BLOCK, "fp8": 512, "quantize": 512, "sign": 512, "topk": 4096}
# What people write for a kind that has another name here.
_OTHER_NAMES = {
    "int8": "Codec('quantize', bits=8)",
    "int4": "Codec('quantize', bits=4)",
    "int2": "Codec('quantize', bits=2)",
    "bfloat16": "Codec('bf16')",
    "float16": "Codec('fp16')",
    "float8": "Codec('fp8')",
    "e4m3": "Codec('fp8')",
    "signsgd": "Codec('sign')",
    "dgc": "Codec('topk', keep=41)",
}
_LARGEST_BLOCK = {"fp8": 4096, "quantize": 4096, "sign": 4096, "topk": 16384}


@dataclasses.dataclass(frozen=True)
class Codec:
    """A gradient codec with its options.

    Attributes:
      kind: One of `KINDS`. `bf16`, `fp16`, `fp8` (E4M3) are casts; `quantize` is symmetric integers, `sign` one bit,
        `topk` the largest elements of each block.
      bits: Of `quantize`: 8, 4 or 2. 0 for the others.
      block: Elements that share a scale, or among which `topk` chooses: a power of two. 0 takes the default of the
        kind; casts without a scale always have 1024, as a unit of work.
      keep: Of `topk`: elements kept of each block, 1 to `block`. 0 for the others.
      scale: Of `quantize` and `sign`: dtype of the scales, `bf16` or `float32` (17 significant bits).
      rounding: Of `quantize`: `nearest` or `stochastic`. Not part of the payload format.

    Raises:
      ValueError: An option that the kind does not have, or a value that is not allowed.
    """

    kind: str
    bits: int = 0
    block: int = 0
    keep: int = 0
    scale: str = "bf16"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        for name in ("bits", "block", "keep"):
            object.__setattr__(self, name, _whole(self.kind, name, getattr(self, name)))
        if self.block == 0:
            object.__setattr__(self, "block", _DEFAULT_BLOCK[self.kind])
        if self.kind == "quantize":
            if self.bits not in (8, 4, 2):
                raise ValueError(f"codec quantize: bits={self.bits!r} is not one of 8, 4, 2")
        elif self.bits:
            raise ValueError(f"codec {self.kind}: bits={self.bits!r} is an option of quantize only")
        self._check_block()
        if self.kind == "topk":
            if not 1 <= self.keep <= self.block:
                raise ValueError(f"codec topk: keep={self.keep!r} is not between 1 and block={self.block}")
        elif self.keep:
            raise ValueError(f"codec {self.kind}: keep={self.keep!r} is an option of topk only")
        _one_of("scale", self.scale, SCALES)
        if self.scale != "bf16" and not self.has_scale:
            raise ValueError(f"codec {self.kind}: scale={self.scale!r} is an option of quantize and sign only")
        _one_of("rounding", self.rounding, ROUNDINGS)
        if self.rounding != "nearest" and self.kind != "quantize":
            raise ValueError(f"codec {self.kind}: rounding={self.rounding!r} is an option of quantize only")

    def _check_block(self) -> None:
        if self.kind not in _LARGEST_BLOCK:
            if self.block != CAST_BLOCK:
                raise ValueError(f"codec {self.kind}: block={self.block!r}; this cast has no blocks, leave it out")
            return
        allowed = block_sizes(self.kind)
        if self.block not in allowed:
            raise ValueError(
                f"codec {self.kind}: block={self.block!r} is not one of {', '.join(map(str, allowed))} elements"
            )

    @property
    def has_scale(self) -> bool:
        """Whether `scale` means anything for this kind (fp8 has scales of one byte, always)."""
        return self.kind in ("quantize", "sign")

    @property
    def scale_bytes(self) -> int:
        """Bytes of one block's scale."""
        if self.has_scale:
            return 2 if self.scale == "bf16" else 4
        return 1 if self.kind == "fp8" else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's codes."""
        bits = {"bf16": 16, "fp16": 16, "fp8": 8, "quantize": self.bits, "sign": 1}
        return 4 * self.keep if self.kind == "topk" else self.block * bits[self.kind] // 8

    def blocks(self, elements: int) -> int:
        """Number of blocks of a vector of so many elements."""
        return -(-elements // self.block)

    def payload_bytes(self, elements: int) -> int:
        """Bytes of the payload of a vector of so many elements, a multiple of 16."""
        body = HEADER_BYTES + self.blocks(elements) * (self.block_bytes + self.scale_bytes)
        return -(-body // 16) * 16

    def header(self, elements: int) -> bytes:
        """The first 16 bytes of that payload."""
        number = _NUMBERS[self.kind, self.bits] + (128 if self.scale == "float32" else 0)
        return MAGIC + struct.pack("<BBHQ", number, self.block.bit_length() - 1, self.keep, elements)


def block_sizes(kind: str) -> list[int]:
    """Blocks that a kind of codec may have, in elements; none for casts without a scale, whose block is fixed."""
    largest = _LARGEST_BLOCK.get(kind, 0)
    return [64 << power for power in range(16) if 64 << power <= largest]


def _check_kind(kind: str) -> None:
    if isinstance(kind, str) and kind in KINDS:
        return
    wanted = str(kind).lower().replace("-", "").replace("_", "")
    hint = _OTHER_NAMES.get(wanted)
    if hint is None:
        near = difflib.get_close_matches(wanted, KINDS, n=1, cutoff=0.5)
        hint = f"Codec({near[0]!r})" if near else ""
    suggestion = f". Did you mean {hint}?" if hint else ""
    raise ValueError(f"codec: kind={kind!r} is not one of {', '.join(KINDS)}{suggestion}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"codec: {name}={value!r} is not one of {', '.join(allowed)}")


def _whole(kind: str, name: str, value: object) -> int:
    """The value as an int; any integer type is one, bool is not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        allowed = ", ".join(map(str, block_sizes(kind))) if name == "block" else ""
        hint = f"; allowed are {allowed} elements" if allowed else ""
        raise ValueError(f"codec {kind}: {name}={value!r} is not a whole number{hint}")
    return int(value)

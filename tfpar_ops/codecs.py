"""What a codec is: a format with its options, and the payload length that follows from them."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import struct
import warnings
from collections.abc import Callable

from tfpar_ops.formats import FORMATS, Format

KINDS = tuple(FORMATS)
SCALES = ("bf16", "float32")
ROUNDINGS = ("nearest", "stochastic")

HEADER_BYTES = 16
MAGIC = b"TFP\x01"
GPU_PEERS = 64  # payloads that one operation adds up on a GPU, at most: TFPAR_CUDA_MAX_PEERS of core/cuda/codec_cuda.h

# `Codec("quantize", bits=8)` was the name of `Codec("int8")`: to be removed in the next version.
_QUANTIZE = {8: "int8", 4: "int4", 2: "int2"}
_FLOAT_SCALES = 128  # added to the number of the format in the header


@dataclasses.dataclass(frozen=True)
class Codec:
    """A gradient codec: a payload format with its options.

    Attributes:
      kind: Name of a format, one of `FORMATS`. `bf16`, `fp16`, `fp8` (E4M3) are casts; `int8`, `int4`, `int2` symmetric
        integers; `sign` is one bit; `topk` the largest elements of each block.
      bits: Follows from the kind: bits of `int8`, `int4`, `int2`, 0 for the others. Leave it out.
      block: Elements that share a scale, or among which `topk` chooses: a power of two. 0 takes the default of the
        format; casts without a scale always have 1024, as a unit of work.
      keep: Of `topk`: elements kept of each block, 1 to `block`. 0 for the others.
      scale: Of the integers and `sign`: dtype of the scales, `bf16` or `float32` (17 significant bits).
      rounding: Of the integers: `nearest` or `stochastic`. Not part of the payload format.

    Raises:
      ValueError: An option that the format does not have, or a value that is not allowed.
    """

    kind: str
    bits: int = dataclasses.field(default=0, repr=False)
    block: int = 0
    keep: int = 0
    scale: str = "bf16"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.kind == "quantize":
            object.__setattr__(self, "kind", _renamed(self.bits))
        _check_kind(self.kind)
        for name in ("bits", "block", "keep"):
            object.__setattr__(self, name, _whole(self.kind, name, getattr(self, name)))
        self._set_bits()
        if self.block == 0:
            object.__setattr__(self, "block", self.format.default_block)
        self._check_block()
        if self.format.keeps:
            if not 1 <= self.keep <= self.block:
                raise ValueError(f"codec {self.kind}: keep={self.keep!r} is not between 1 and block={self.block}")
        elif self.keep:
            raise self._foreign("keep", lambda other: other.keeps)
        _one_of("scale", self.scale, SCALES)
        if self.scale != "bf16" and not self.has_scale:
            raise self._foreign("scale", lambda other: other.scale == "float")
        _one_of("rounding", self.rounding, ROUNDINGS)
        if self.rounding != "nearest" and not self.format.stochastic:
            raise self._foreign("rounding", lambda other: other.stochastic)

    def _set_bits(self) -> None:
        bits = next((number for number, name in _QUANTIZE.items() if name == self.kind), 0)
        if self.bits not in (0, bits):
            raise ValueError(f"codec {self.kind}: bits={self.bits!r} follows from the kind, leave it out")
        object.__setattr__(self, "bits", bits)

    def _check_block(self) -> None:
        allowed = self.format.blocks
        if self.block in allowed:
            return
        if len(allowed) == 1:
            raise ValueError(f"codec {self.kind}: block={self.block!r}; this cast has no blocks, leave it out")
        raise ValueError(
            f"codec {self.kind}: block={self.block!r} is not one of {', '.join(map(str, allowed))} elements"
        )

    def _foreign(self, option: str, has_option: Callable[[Format], bool]) -> ValueError:
        """The error for an option that this format does not have."""
        names = ", ".join(entry.name for entry in FORMATS.values() if has_option(entry))
        return ValueError(f"codec {self.kind}: {option}={getattr(self, option)!r} is an option of {names} only")

    @property
    def format(self) -> Format:
        """The entry of its format."""
        return FORMATS[self.kind]

    @property
    def has_scale(self) -> bool:
        """Whether `scale` means anything for this kind (fp8 has scales of one byte, always)."""
        return self.format.scale == "float"

    @property
    def scale_bytes(self) -> int:
        """Bytes of one block's scale."""
        if self.has_scale:
            return 2 if self.scale == "bf16" else 4
        return 1 if self.format.scale == "byte" else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's codes."""
        return (self.keep if self.format.keeps else self.block) * self.format.code_bits // 8

    def blocks(self, elements: int) -> int:
        """Number of blocks of a vector of `elements` elements."""
        return -(-elements // self.block)

    def payload_bytes(self, elements: int) -> int:
        """Bytes of the payload of a vector of `elements` elements, a multiple of 16."""
        body = HEADER_BYTES + self.blocks(elements) * (self.block_bytes + self.scale_bytes)
        return -(-body // 16) * 16

    def header(self, elements: int) -> bytes:
        """The first 16 bytes of that payload."""
        number = self.format.number + (_FLOAT_SCALES if self.scale == "float32" else 0)
        return MAGIC + struct.pack("<BBHQ", number, self.block.bit_length() - 1, self.keep, elements)


def _renamed(bits: object) -> str:
    """The name that `quantize` with `bits` has now."""
    kind = _QUANTIZE.get(_whole("quantize", "bits", bits))
    if kind is None:
        calls = ", ".join(FORMATS[name].call for name in _QUANTIZE.values())
        raise ValueError(f"codec quantize: bits={bits!r} is not one of 8, 4, 2; use {calls}")
    warnings.warn(
        f"Codec('quantize', bits={bits}) is deprecated, use {FORMATS[kind].call}", DeprecationWarning, stacklevel=4
    )
    return kind


def _check_kind(kind: str) -> None:
    if isinstance(kind, str) and kind in FORMATS:
        return
    wanted = str(kind).lower().replace("-", "").replace("_", "")
    meant = [entry.name for entry in FORMATS.values() if wanted in entry.other_names]
    near = meant or difflib.get_close_matches(wanted, FORMATS, n=1, cutoff=0.5)
    suggestion = f". Did you mean {FORMATS[near[0]].call}?" if near else ""
    raise ValueError(f"codec: kind={kind!r} is not one of {', '.join(FORMATS)}{suggestion}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"codec: {name}={value!r} is not one of {', '.join(allowed)}")


def _whole(kind: str, name: str, value: object) -> int:
    """The value as an int; any integer type is one, bool is not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        blocks = FORMATS[kind].blocks if name == "block" else ()
        hint = f"; allowed are {', '.join(map(str, blocks))} elements" if len(blocks) > 1 else ""
        raise ValueError(f"codec {kind}: {name}={value!r} is not a whole number{hint}")
    return int(value)

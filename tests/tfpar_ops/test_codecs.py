"""Options of a codec, the payload length that follows from them, and the header."""

from __future__ import annotations

import dataclasses
import re

from tests.tfpar_ops import data, oracle
from tfpar_ops.codecs import Codec
from tfpar_ops.formats import FORMATS

import pytest

KINDS = ", ".join(FORMATS)
BLOCKS = "64, 128, 256, 512, 1024, 2048, 4096"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "e4m3"}, f"codec: kind='e4m3' is not one of {KINDS}. Did you mean Codec('fp8')?"),
        ({"kind": "INT-4"}, f"codec: kind='INT-4' is not one of {KINDS}. Did you mean Codec('int4')?"),
        ({"kind": "DGC"}, "Did you mean Codec('topk', keep=41)?"),
        ({"kind": "topK"}, "Did you mean Codec('topk', keep=41)?"),
        ({"kind": "gzip"}, f"codec: kind='gzip' is not one of {KINDS}"),
        ({"kind": 8}, "codec: kind=8 is not one of bf16"),
        ({"kind": "quantize"}, "codec quantize: bits=0 is not one of 8, 4, 2; use Codec('int8'), Codec('int4'), "),
        ({"kind": "quantize", "bits": 3}, "codec quantize: bits=3 is not one of 8, 4, 2"),
        ({"kind": "sign", "bits": 1}, "codec sign: bits=1 follows from the kind, leave it out"),
        ({"kind": "int4", "bits": 8}, "codec int4: bits=8 follows from the kind, leave it out"),
        ({"kind": "bf16", "block": 512}, "codec bf16: block=512; this cast has no blocks, leave it out"),
        ({"kind": "sign", "block": 96}, f"codec sign: block=96 is not one of {BLOCKS} elements"),
        ({"kind": "fp8", "block": 32}, f"codec fp8: block=32 is not one of {BLOCKS} elements"),
        ({"kind": "fp8", "block": -64}, f"codec fp8: block=-64 is not one of {BLOCKS} elements"),
        ({"kind": "int4", "block": 8192}, f"block=8192 is not one of {BLOCKS} elements"),
        ({"kind": "topk", "keep": 1, "block": 32768}, f"block=32768 is not one of {BLOCKS}, 8192, 16384 elements"),
        ({"kind": "topk"}, "codec topk: keep=0 is not between 1 and block=4096"),
        ({"kind": "topk", "block": 64, "keep": 65}, "codec topk: keep=65 is not between 1 and block=64"),
        ({"kind": "fp16", "keep": 3}, "codec fp16: keep=3 is an option of topk only"),
        ({"kind": "sign", "scale": "fp16"}, "codec: scale='fp16' is not one of bf16, float32"),
        ({"kind": "fp8", "scale": "float32"}, "codec fp8: scale='float32' is an option of int8, int4, "),
        ({"kind": "sign", "rounding": "up"}, "codec: rounding='up' is not one of nearest, stochastic"),
        (
            {"kind": "sign", "rounding": "stochastic"},
            "codec sign: rounding='stochastic' is an option of int8, int4, ",
        ),
    ],
)
def test_options_that_are_not_allowed(options: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        Codec(**options)


def test_defaults_and_limits():
    assert [Codec(kind).block for kind in ("bf16", "fp16", "fp8", "sign")] == [1024, 1024, 512, 512]
    assert Codec("topk", keep=4096).block == 4096
    assert Codec("topk", block=16384, keep=16384).block_bytes == 4 * 16384


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_old_name_of_integers_still_works(bits: int):
    with pytest.warns(DeprecationWarning, match=re.escape(f"use Codec('int{bits}')")) as warned:
        old = Codec("quantize", bits, 128)
    assert warned[0].filename == __file__
    new = Codec(f"int{bits}", block=128)
    assert old == new
    assert (new.bits, dataclasses.replace(new, block=64)) == (bits, Codec(f"int{bits}", block=64))


@pytest.mark.parametrize("codec", data.CODECS, ids=data.identifier)
def test_bits_are_packed(codec: Codec):
    """Bytes per element within 1% of what codes and scales need, at a million elements, and beyond 2^31."""
    codes = codec.keep / codec.block if codec.kind == "topk" else 1
    scale = 8 * codec.scale_bytes / codec.block
    for elements in (1_000_003, 3_000_000_001):
        ideal = elements * (codes * oracle.CODE_BITS[codec.kind] + scale) / 8
        assert ideal <= codec.payload_bytes(elements) <= 1.01 * ideal


@pytest.mark.parametrize("codec", data.CODECS, ids=data.identifier)
def test_length_and_header_of_every_payload(codec: Codec):
    for elements in (
        0,
        1,
        63,
        64,
        65,
        codec.block - 1,
        codec.block,
        codec.block + 1,
        4100,
        2**24 + 1,
        2**31,
        2**40 + 7,
    ):
        blocks = -(-elements // codec.block)
        body = 16 + blocks * (oracle.code_size(codec) + oracle.scale_size(codec))
        assert codec.payload_bytes(elements) - body in range(16)
        assert codec.payload_bytes(elements) % 16 == 0
        assert codec.header(elements) == oracle.header(codec, elements)


def test_no_two_formats_share_a_header():
    codecs = {codec.header(100): codec for codec in data.CODECS}
    formats = {(c.kind, c.block, c.keep, c.scale) for c in data.CODECS}
    assert len(codecs) == len(formats)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "topk", "keep": 2.5},
        {"kind": "topk", "keep": True},
        {"kind": "quantize", "bits": 4.0},
        {"kind": "int4", "block": "abc"},
    ],
)
def test_numbers_are_whole(options):
    with pytest.raises(ValueError, match="is not a whole number"):
        Codec(**options)

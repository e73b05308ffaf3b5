"""Vectors past 2^24 elements, where a float32 counts no more: repeated patterns, so that NumPy can tell the result."""

from __future__ import annotations

from tests.tfpar_ops import data, implementations, oracle
from tfpar_ops.codecs import Codec

import numpy as np
import pytest

ELEMENTS = 2**24 + 12_345


@pytest.mark.parametrize("codec", data.KINDS, ids=data.identifier)
def test_past_2_to_the_24(codec: Codec):
    """Payload, residual and decoded sum of a vector that is one pattern of five blocks over and over."""
    ops = implementations.get("native")
    period = 5 * codec.block
    times, rest = divmod(ELEMENTS, period)
    x, r = data.values(period, "normal", 1), data.values(period, "normal", 2)
    made = ops.encode([np.resize(x, ELEMENTS - 3), np.resize(x, ELEMENTS)[-3:]], np.resize(r, ELEMENTS), codec)

    whole, left = oracle.encode(codec, x, r)
    last, left_last = oracle.encode(codec, x[:rest], r[:rest])
    size, scale = oracle.code_size(codec), oracle.scale_size(codec)
    blocks = codec.blocks(rest)
    expected = oracle.header(codec, ELEMENTS)
    expected += whole[16 : 16 + 5 * size] * times + last[16 : 16 + blocks * size]
    ends = 16 + 5 * size, 16 + blocks * size
    expected += whole[ends[0] : ends[0] + 5 * scale] * times + last[ends[1] : ends[1] + blocks * scale]
    assert made.payloads[0] == expected + bytes(-len(expected) % 16)
    data.same_bits(made.residual, np.concatenate([np.tile(left, times), left_last]))

    once, once_last = oracle.decode(codec, whole, period), oracle.decode(codec, last, rest)
    total = ops.decode_sum(made.payloads * 2, codec, ELEMENTS, factor=0.5)
    data.same(total, np.concatenate([np.tile(once, times), once_last]))


def test_norms_do_not_lose_count(ops: implementations.Implementation):
    """A running float32 sum of ones would end at 2^24."""
    ones = np.ones(ELEMENTS, np.float32)
    assert ops.norm_squared([ones])[0] == pytest.approx(ELEMENTS, rel=1e-6)


def test_random_numbers_past_2_to_the_24():
    """The last block of a long vector, rounded with the numbers of its place."""
    ops = implementations.get("native")
    codec = Codec("int4", rounding="stochastic")
    x = np.resize(data.values(codec.block, "normal", 3), ELEMENTS)
    made = ops.encode([x], None, codec, seed=2**40 + 1, step=2**33)
    begin = ELEMENTS // codec.block * codec.block
    last, _ = oracle.encode(codec, x[begin:], begin=begin, seed=2**40 + 1, step=2**33)
    at = 16 + begin // codec.block * codec.block_bytes
    assert made.payloads[0][at : at + codec.block_bytes] == last[16 : 16 + codec.block_bytes]

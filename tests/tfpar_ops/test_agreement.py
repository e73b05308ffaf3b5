"""Every implementation gives the oracle's bits: payloads byte for byte, residuals and decoded values bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

from tests.tfpar_ops import core, data, implementations, oracle
from tfpar_ops.codecs import Codec

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = st.integers(0, 2**64 - 1)
FACTORS = st.sampled_from([1.0, 0.25, 1 / 3, 1 - 2.0**-24, -1.5])


def shard(vector: np.ndarray, index: int, size: int) -> np.ndarray:
    return vector[index * size : (index + 1) * size]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *(("native", codec) for codec in data.CODECS),
        # These compile for seconds, or take longer for each call: one codec of each kind, and random numbers.
        *((name, codec) for name in ("reference", "xla") for codec in [*data.KINDS, data.STOCHASTIC[0]]),
    ],
    ids=lambda value: value if isinstance(value, str) else data.identifier(value),
)
def test_every_operation_on_one_layout(name: str, codec: Codec):
    """Three shards, the second ending in padding, the third all padding; in parts, one of them empty."""
    ops = implementations.get(name)
    size, elements, valid = 2 * codec.block, 3 * codec.block + 17, 2 * codec.block - 7
    shapes = [(5,), (), (0, 3), (codec.block, 2), (elements - 6 - 2 * codec.block,)]
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])

    @settings(deadline=None, max_examples=10)
    @given(data.numbers(), data.numbers(), WORDS, WORDS)
    def check(numbers, residuals, seed, step):
        x, r, owner = numbers.fill(elements), residuals.fill(elements), residuals.fill(valid, 1)
        parts = [part.reshape(shape) for part, shape in zip(np.split(x, ends[:-1]), shapes, strict=True)]
        made = ops.encode(parts, r, codec, shards=3, shard_elements=size, seed=seed, step=step)
        expected = [
            oracle.encode(codec, shard(x, s, size), shard(r, s, size), size, s * size, seed, step) for s in range(3)
        ]
        assert made.payloads == [payload for payload, _ in expected]
        data.same_bits(made.residual, np.concatenate([residual for _, residual in expected]))

        decoded = ops.decode(made.payloads, codec, shapes, shard_elements=size)
        assert [part.shape for part in decoded] == shapes
        back = np.concatenate([oracle.decode(codec, payload, size) for payload in made.payloads])[:elements]
        data.same(np.concatenate([part.ravel() for part in decoded]), back)

        peers = [oracle.encode(codec, numbers.fill(size, 2 + i), seed=seed, step=step)[0] for i in range(3)]
        data.same(ops.decode_sum(peers, codec, size), oracle.decode_sum(codec, peers, size))
        again = ops.recode(
            peers, owner, codec, size, factor=1 / 3, begin=tf.constant(size), valid=valid, seed=seed, step=step
        )
        payload, residual = oracle.recode(
            codec, peers, owner, size, factor=1 / 3, begin=size, valid=valid, seed=seed, step=step
        )
        assert again.payloads == [payload]
        data.same_bits(again.residual, residual)

    check()


@pytest.mark.parametrize("codec", data.CODECS, ids=data.identifier)
def test_encode_and_decode_any_layout(ops: implementations.Implementation, codec: Codec):
    @settings(deadline=None, max_examples=8)
    @given(data.numbers(), data.lengths(codec), st.lists(st.floats(0, 1), max_size=3), st.integers(1, 3), WORDS)
    def check(numbers, elements, places, shards, seed):
        x, r = numbers.fill(elements), numbers.fill(elements, 1)
        made = ops.encode(data.cut(x, places), r, codec, shards=shards, seed=seed, step=3)
        plain = ops.encode(data.cut(x, places), None, codec, shards=shards, seed=seed, step=3)
        assert plain.residual is None
        size = elements if shards == 1 else -(-elements // shards // codec.block) * codec.block
        for s in range(shards):
            x_s, r_s = shard(x, s, size), shard(r, s, size)
            payload, residual = oracle.encode(codec, x_s, r_s, size, s * size, seed, 3)
            assert made.payloads[s] == payload
            data.same_bits(shard(made.residual, s, size), residual)
            assert plain.payloads[s] == oracle.encode(codec, x_s, None, size, s * size, seed, 3)[0]
        back = [oracle.decode(codec, payload, size) for payload in made.payloads]
        shapes = [part.shape for part in data.cut(x, places)]
        data.same(np.concatenate(ops.decode(made.payloads, codec, shapes)), np.concatenate(back)[:elements])

    check()


@pytest.mark.parametrize("codec", data.CODECS, ids=data.identifier)
def test_sums_and_recoding_of_any_number_of_peers(ops: implementations.Implementation, codec: Codec):
    @settings(deadline=None, max_examples=8)
    @given(data.numbers(), data.lengths(codec), st.integers(1, 5), FACTORS, st.floats(0, 1), st.integers(0, 2**40))
    def check(numbers, elements, peers, factor, share, block):
        payloads = [oracle.encode(codec, numbers.fill(elements, i), seed=9, step=i)[0] for i in range(peers)]
        total = oracle.decode_sum(codec, payloads, elements, factor)
        data.same(ops.decode_sum(payloads, codec, elements, factor=factor), total)
        data.same(ops.decode_sum(payloads, codec, elements, factor=tf.constant(factor, tf.float32)), total)

        valid, begin = int(share * elements), block * codec.block
        owner = numbers.fill(valid, peers)
        for residual in (owner, None):
            options = {"factor": factor, "begin": begin, "valid": valid, "seed": 2**63, "step": 2**32 - 1}
            made = ops.recode(payloads, residual, codec, elements, **options)
            payload, rest = oracle.recode(codec, payloads, residual, elements, **options)
            assert made.payloads == [payload]
            if residual is not None:
                data.same_bits(made.residual, rest)

    check()


LONGEST = 4100
# Next to a multiple of 64 up to 200, and every 97th.
SOME_LENGTHS = [n for n in range(LONGEST + 1) if n % 97 == 0 or (n < 200 and (n + 1) % 64 <= 2)]


class Lengths:
    """What the oracle makes of the first n of some numbers, for one n after the other.

    Args:
      codec: The codec.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.x = data.values(LONGEST, "normal", 11)
        self.r = data.values(LONGEST, "ties", 12) * np.float32(1e-3)
        self._v = oracle.flush(oracle.add(self.x, self.r))
        self._whole: list[tuple[tuple[bytes, bytes], np.ndarray, np.ndarray]] = []

    def expected(self, n: int) -> tuple[bytes, np.ndarray, np.ndarray]:
        """Payload, residual, and what the payload decodes to. Blocks that are full are those of shorter lengths."""
        full, rest = divmod(n, self.codec.block)
        while len(self._whole) < full:
            self._whole.append(self._block(len(self._whole), self.codec.block))
        blocks = self._whole[:full] + ([self._block(full, rest)] if rest else [])
        nothing = np.zeros(0, np.float32)
        return (
            oracle.frame(self.codec, n, [stored for stored, _, _ in blocks]),
            np.concatenate([nothing, *(left for _, left, _ in blocks)]),
            np.concatenate([nothing, *(decoded for _, _, decoded in blocks)]),
        )

    def _block(self, number: int, existing: int) -> tuple[tuple[bytes, bytes], np.ndarray, np.ndarray]:
        """What a block with so many elements stores, leaves, and decodes to."""
        begin = number * self.codec.block
        own = self._v[begin : begin + existing]
        stored = oracle.encode_block(self.codec, np.pad(own, (0, self.codec.block - existing)), existing, number, 5, 6)
        decoded = oracle.decode_block(self.codec, *stored)[:existing]
        return stored, oracle.new_residual(own, decoded, self.r[begin : begin + existing]), decoded


@pytest.mark.parametrize("codec", data.KINDS, ids=data.identifier)
def test_lengths_to_two_blocks_in_the_native_core(codec: Codec):
    """Every one to two blocks, and then those next to a multiple of 64, through the C interface."""
    check_lengths_in_the_native_core(
        codec, (n for n in range(LONGEST + 1) if n <= 2 * codec.block + 1 or (n + 1) % 64 <= 2)
    )


@pytest.mark.proof
@pytest.mark.parametrize("codec", data.KINDS, ids=data.identifier)
def test_every_length_in_the_native_core(codec: Codec):
    """All lengths to 4,100, in two parts, through the C interface that the operations call."""
    check_lengths_in_the_native_core(codec, range(LONGEST + 1))


def check_lengths_in_the_native_core(codec: Codec, numbers: Iterable[int]) -> None:
    lengths = Lengths(codec)
    for n in numbers:
        payload, left, decoded = lengths.expected(n)
        made = core.encode([lengths.x[: n // 3], lengths.x[n // 3 : n]], lengths.r[:n], codec, seed=5, step=6)
        assert made[0] == payload, n
        data.same_bits(made[1], left)
        data.same(core.decode_sum([payload], codec, n), decoded)


@pytest.mark.parametrize("codec", data.KINDS, ids=data.identifier)
def test_many_lengths(ops: implementations.Implementation, codec: Codec):
    """The operations, which are made anew for every length, at some of them: those of the reference take longer."""
    lengths = Lengths(codec)
    for n in SOME_LENGTHS[:: 3 if ops.name == "reference" else 1]:
        payload, left, decoded = lengths.expected(n)
        made = ops.encode([lengths.x[: n // 3], lengths.x[n // 3 : n]], lengths.r[:n], codec, seed=5, step=6)
        assert made.payloads == [payload], n
        data.same_bits(made.residual, left)
        data.same(ops.decode_sum(made.payloads, codec, n), decoded)

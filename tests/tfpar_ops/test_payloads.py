"""Payloads that do not come from `encode`: truncated, of another codec or length, or hostile."""

from __future__ import annotations

import re

from tests.tfpar_ops import data, implementations, oracle
from tfpar_ops import reference
from tfpar_ops.codecs import Codec

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

Implementation = implementations.Implementation

HEADER = r"(?s)payload header: .*expected "
INT4 = Codec("int4", block=64)
FOREIGN = [
    (Codec("int4", block=128), 100),
    (Codec("int4", block=64, scale="float32"), 100),
    (Codec("int2", block=128), 100),
    (INT4, 99),
    (INT4, 128),
]


def payload(codec: Codec, elements: int) -> bytes:
    return oracle.encode(codec, data.values(elements, "normal", 1))[0]


def every_reader(ops: Implementation, payloads: list[bytes], codec: Codec, elements: int) -> list:
    """The three operations that read payloads, as calls."""
    return [
        lambda: ops.decode(payloads[:1], codec, [(elements,)]),
        lambda: ops.decode_sum(payloads, codec, elements),
        lambda: ops.recode(payloads, np.zeros(elements, np.float32), codec, elements),
    ]


@pytest.mark.parametrize("change", [-4, 4, -16, 16, -48])
def test_a_payload_of_another_length_raises(ops: Implementation, change: int):
    whole = payload(INT4, 100)
    other = whole[:change] if change < 0 else whole + bytes(change)
    for call in every_reader(ops, [other] * 2, INT4, 100):
        with pytest.raises(ValueError, match=rf"shape \(\d, {len(other) // 4}\); expected .*{len(whole) // 4} words"):
            call()


@pytest.mark.parametrize(("codec", "elements"), FOREIGN, ids=str)
def test_a_payload_of_another_codec_or_length_raises(ops: Implementation, codec: Codec, elements: int):
    """Even if it happens to be as long, and comes after a good one."""
    good, bad = payload(INT4, 100), payload(codec, elements)
    bad = (bad + bytes(len(good)))[: len(good)]
    for call in every_reader(ops, [bad, good], INT4, 100):
        with pytest.raises(tf.errors.InvalidArgumentError, match=HEADER):
            call()
    for call in every_reader(ops, [good, bad], INT4, 100)[1:]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=HEADER):
            call()


@pytest.mark.parametrize("place", range(16))
def test_every_byte_of_the_header_matters(ops: Implementation, place: int):
    codec = Codec("topk", block=64, keep=3)
    wrong = bytearray(payload(codec, 10))
    wrong[place] ^= 0x80
    for call in every_reader(ops, [bytes(wrong)], codec, 10):
        with pytest.raises(tf.errors.InvalidArgumentError, match=HEADER):
            call()


@pytest.mark.parametrize("position", [64, 65, 0x7FFF, 0x8000, 0xFFFF])
def test_a_position_outside_of_its_block_raises(ops: Implementation, position: int):
    codec = Codec("topk", block=64, keep=3)
    wrong = bytearray(payload(codec, 100))
    wrong[16 + 12 + 4 : 16 + 12 + 6] = position.to_bytes(2, "little")  # the last of the second block
    for call in every_reader(ops, [bytes(wrong)], codec, 100):
        with pytest.raises(tf.errors.InvalidArgumentError, match="position"):
            call()


@pytest.mark.parametrize("peer", [0, 1])
def test_a_residual_stays_as_it_was_where_encoding_again_fails(ops: Implementation, peer: int):
    """The last of many blocks is the wrong one: those before it must not have been updated by then."""
    codec, elements = Codec("topk", block=64, keep=3), 100_000
    wrong = bytearray(payload(codec, elements))
    wrong[16 + 12 * (codec.blocks(elements) - 1) + 1] = 0xFF
    payloads = [payload(codec, elements)] * 2
    before = np.random.default_rng(2).standard_normal(elements).astype(np.float32)
    variable = tf.Variable(before)
    ops.module.recode_into(variable, implementations.words_of(payloads), codec, elements)
    before = variable.numpy().copy()
    payloads[peer] = bytes(wrong)
    expected = rf"payloads\[{peer}\]: topk position \d+, in block {codec.blocks(elements) - 1}, is not below"
    with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
        ops.module.recode_into(variable, implementations.words_of(payloads), codec, elements)
    data.same_bits(variable.numpy(), before)
    foreign = implementations.words_of([payloads[0], payload(codec, elements)])
    foreign = tf.tensor_scatter_nd_update(foreign, [[peer, 2]], [elements - 1])  # the header's number of elements
    with pytest.raises(tf.errors.InvalidArgumentError, match=HEADER):
        ops.module.recode_into(variable, foreign, codec, elements)
    data.same_bits(variable.numpy(), before)


def test_in_a_graph_it_raises_too(ops: Implementation):
    good, bad = payload(INT4, 100), payload(INT4, 128)

    @tf.function(autograph=False)
    def total(words: tf.Tensor) -> tf.Tensor:
        return ops.module.decode_sum(words, INT4, 100)

    assert total(implementations.words_of([good])).shape == [100]
    with pytest.raises(tf.errors.InvalidArgumentError, match=HEADER):
        total(implementations.words_of([bad]))


def test_where_xla_drops_assertions_the_result_is_nan():
    codec = Codec("topk", block=64, keep=3)
    good = payload(codec, 100)
    foreign, outside = bytearray(good), bytearray(good)
    foreign[8] ^= 1
    outside[16:18] = b"\x40\x00"

    @tf.function(jit_compile=True, autograph=False)
    def read(words: tf.Tensor) -> list[tf.Tensor]:
        parts = reference.decode(words[:1], codec, [(30,), (70,)])
        again = reference.recode(words, tf.ones([100]), codec, 100)
        return [*parts, reference.decode_sum(words, codec, 100), again.payload, again.residual]

    *parts, total, _, _ = read(implementations.words_of([good, good]))
    assert np.all(np.isfinite(tf.concat([*parts, total], axis=0)))
    for bad in (foreign, outside):
        *parts, total, words, residual = read(implementations.words_of([bytes(bad), good]))
        assert np.all(np.isnan(tf.concat([*parts, total], axis=0)))
        assert np.all(np.isnan(oracle.decode(codec, words.numpy().tobytes(), 100)))
        assert np.all(residual == 1)


@pytest.mark.parametrize("codec", data.KINDS, ids=data.identifier)
def test_one_program_of_xla_reads_every_payload(codec: Codec):
    """An argument that says which part of another to take would be a constant, and compiled anew for every value."""
    elements = 2 * codec.block

    @tf.function(jit_compile=True, autograph=False)
    def read(words: tf.Tensor, begin: tf.Tensor, factor: tf.Tensor) -> list[tf.Tensor]:
        again = reference.recode(words, tf.ones([elements]), codec, elements, begin=begin, factor=factor)
        parts = reference.decode(words[:1], codec, [(elements,)])
        return [*parts, reference.decode_sum(words, codec, elements, factor=factor), again.payload, again.residual]

    words = implementations.words_of([payload(codec, elements)] * 2)
    program = read.experimental_get_compiler_ir(words, tf.constant(0), tf.constant(0.5))(stage="hlo")
    arguments = re.search(r"entry_computation_layout=\{\((.*?)\)->", program)[1]
    assert re.fullmatch(rf"s32\[2,{words.shape[1]}\]\S*, s32\[\], f32\[\]", arguments), arguments


@pytest.mark.parametrize("codec", data.CODECS, ids=data.identifier)
def test_any_content_decodes_to_what_the_oracle_says(ops: Implementation, codec: Codec):
    """Random bytes behind a good header: infinite, negative, denormal scales, unused codes, positions that repeat."""

    @settings(deadline=None, max_examples=6)
    @given(data.lengths(codec), st.integers(0, 2**31), st.integers(1, 3))
    def check(elements, seed, peers):
        rng = np.random.default_rng(seed)
        payloads = []
        for _ in range(peers):
            words = rng.integers(0, 256, codec.payload_bytes(elements), dtype=np.uint8)
            # Half of the time most bytes are the same: few positions, extreme scales.
            if rng.random() < 0.5:
                words[rng.random(len(words)) < 0.9] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            words[:16] = np.frombuffer(oracle.header(codec, elements), np.uint8)
            if codec.kind == "topk":
                positions = words[16:].view(np.uint16)[: codec.blocks(elements) * 2 * codec.keep]
                positions.reshape(-1, 2, codec.keep)[:, 0] %= codec.block
            payloads.append(words.tobytes())
        data.same(ops.decode_sum(payloads, codec, elements), oracle.decode_sum(codec, payloads, elements))
        made = ops.recode(payloads, None, codec, elements, factor=0.5, seed=seed)
        assert made.payloads == [oracle.recode(codec, payloads, None, elements, factor=0.5, seed=seed)[0]]

    check()


@pytest.mark.parametrize("codec", [Codec("topk", block=64, keep=3), Codec("topk", block=64, keep=64)])
def test_positions_that_repeat_add_up(ops: Implementation, codec: Codec):
    positions = np.full(codec.keep, 5, np.uint16)
    values = oracle.bf16_codes(np.arange(1, codec.keep + 1).astype(np.float32))
    body = oracle.header(codec, 64) + positions.tobytes() + values.tobytes()
    decoded = ops.decode_sum([body + bytes(-len(body) % 16)], codec, 64)
    assert decoded[5] == codec.keep * (codec.keep + 1) / 2
    assert np.count_nonzero(decoded) == 1

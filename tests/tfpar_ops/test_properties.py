"""What users of a codec rely on, whatever its bytes: error bounds, mass, zeros, NaN, sums, shards, order."""

from __future__ import annotations

import functools
import math

from tests.tfpar_ops import data, implementations, oracle
from tfpar_ops.codecs import Codec
from tfpar_ops.formats import FORMATS

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Implementation = implementations.Implementation

TINY = 2.0**-126
# No overflow on the way, so that bounds need no exceptions.
TAME = ("normal", "grid", "ties", "zeros", "tiny")
every_codec = pytest.mark.parametrize("codec", [*data.KINDS, *data.STOCHASTIC], ids=data.identifier)


def blocks_of(codec: Codec, vector: np.ndarray) -> np.ndarray:
    """A vector as rows of blocks, padded with zeros."""
    return np.pad(vector, (0, -len(vector) % codec.block)).reshape(-1, codec.block)


def round_trip(ops: Implementation, codec: Codec, v: np.ndarray, seed: int = 0, step: int = 0) -> np.ndarray:
    made = ops.encode([v], None, codec, seed=seed, step=step)
    return ops.decode_sum(made.payloads, codec, len(v))


def error_bound(codec: Codec, v: np.ndarray) -> np.ndarray:
    """The largest |v - decoded| that the format allows, per element; infinity where it promises nothing."""
    rows = blocks_of(codec, np.abs(v).astype(np.float64))
    largest = rows.max(axis=1, keepdims=True, initial=0)
    if codec.kind == "bf16":
        bound = rows * 2.0**-8
    elif codec.kind == "fp16":
        bound = np.where(rows <= 65504, np.maximum(rows * 2.0**-11, 2.0**-25), np.inf)
    elif codec.kind == "fp8":
        bound = np.maximum(rows * 2.0**-4, largest / 224 * 2.0**-10)
    elif codec.bits:
        steps = 1.0 if codec.rounding == "stochastic" else 0.5
        bound = np.broadcast_to(largest * steps * (1 + 2.0**-7) / (2 ** (codec.bits - 1) - 1), rows.shape)
    elif codec.kind == "topk":
        smallest_kept = np.sort(rows, axis=1)[:, -codec.keep, np.newaxis]
        bound = np.maximum(rows * 2.0**-8, np.where(rows <= smallest_kept, rows, 0))
    else:
        bound = np.full(rows.shape, np.inf)
    # A scale of up to 2^-126 is 0, and with it the largest value of up to 127 times that.
    return bound.ravel()[: len(v)] + TINY * 2**codec.bits


@every_codec
def test_error_is_bounded(ops: Implementation, codec: Codec):
    @settings(deadline=None, max_examples=6)
    @given(data.numbers(TAME, not_finite=0), data.lengths(codec))
    def check(numbers, elements):
        v = numbers.fill(elements)
        error = np.abs(v.astype(np.float64) - round_trip(ops, codec, v, seed=numbers.seed))
        assert np.all(error <= error_bound(codec, v))

    check()


@every_codec
def test_mass_is_kept(ops: Implementation, codec: Codec):
    """`residual + decoded == x + old residual`, but for what `flush` takes, less than 2^-126.

    Exactly so if rounded to nearest, else within half a unit in the last place.
    """
    exact = codec.kind != "sign" and codec.rounding == "nearest"

    @settings(deadline=None, max_examples=6)
    @given(data.numbers(TAME, not_finite=0), data.numbers(TAME, not_finite=0), data.lengths(codec))
    def check(numbers, residuals, elements):
        x, r = numbers.fill(elements), residuals.fill(elements)
        made = ops.encode([x], r, codec, seed=1, step=2)
        v = oracle.flush(oracle.add(x, r))
        decoded = ops.decode_sum(made.payloads, codec, elements)
        unit = np.zeros(elements) if exact else np.spacing(np.maximum(np.abs(v), np.abs(decoded)))
        lost = [abs(math.fsum(terms)) for terms in zip(v, -decoded, -made.residual, strict=True)]
        assert np.all(lost <= np.maximum(unit / 2, TINY * (1 - 2.0**-24)))

    check()


@every_codec
def test_error_feedback_delivers_everything_in_the_end(ops: Implementation, codec: Codec):
    """Sum of what was decoded, plus the last residual, is the sum of the inputs."""
    steps, elements = 30, codec.block + 9
    rng = np.random.default_rng(3)
    residual, sent, given_in = np.zeros(elements, np.float32), np.zeros(elements), np.zeros(elements)
    for step in range(steps):
        x = rng.normal(size=elements).astype(np.float32)
        made = ops.encode([x], residual, codec, seed=4, step=step)
        residual = made.residual
        sent += ops.decode_sum(made.payloads, codec, elements)
        given_in += x
    np.testing.assert_allclose(sent + residual, given_in, atol=steps * 1e-5)


@every_codec
def test_zeros_stay_zeros(ops: Implementation, codec: Codec):
    @settings(deadline=None, max_examples=6)
    @given(data.numbers(TAME, not_finite=0), data.lengths(codec), st.integers(0, 2**31))
    def check(numbers, elements, seed):
        x = numbers.fill(elements)
        zero = np.random.default_rng(seed).random(elements) < 0.5
        x[zero] = -0.0 if seed % 2 else 0.0
        decoded = round_trip(ops, codec, x, seed=seed)
        if codec.kind != "sign":
            assert not np.any(decoded[zero].view(np.uint32))
        empty = np.repeat(~np.any(blocks_of(codec, x), axis=1), codec.block)[:elements]
        assert not np.any(decoded[empty].view(np.uint32))
        nothing = ops.encode([x * 0], np.zeros_like(x), codec, seed=seed)
        assert not np.any(nothing.residual.view(np.uint32))
        assert not np.any(ops.decode_sum(nothing.payloads, codec, elements).view(np.uint32))

    check()


@every_codec
@pytest.mark.parametrize("bad", data.NOT_FINITE.view(np.uint32), ids=hex)
def test_what_is_not_finite_decodes_to_nan_and_leaves_the_residual(ops: Implementation, codec: Codec, bad: np.uint32):
    """In the second block of four: casts lose one element, the others the block, and no other block notices."""
    rng = np.random.default_rng(7)
    elements, place = 4 * codec.block - 5, codec.block + 17
    x, r = rng.normal(size=(2, elements)).astype(np.float32)
    r.view(np.uint32)[[place, place + 1]] = 1, 0x80000003  # denormals, which any arithmetic would flush
    clean = ops.encode([x], r, codec)
    for spoilt in (x, r):
        kept = spoilt.view(np.uint32)[place]
        spoilt.view(np.uint32)[place] = bad
        made = ops.encode([x], r, codec)
        lost = np.zeros(elements, bool)
        cast = FORMATS[codec.kind].scale == "none" and not FORMATS[codec.kind].keeps
        lost[place if cast else slice(codec.block, 2 * codec.block)] = True
        decoded = ops.decode_sum(made.payloads, codec, elements)
        assert np.all(np.isnan(decoded) == lost)
        data.same_bits(made.residual[lost], r[lost])
        data.same_bits(made.residual[~lost], clean.residual[~lost])
        # A sum with a good payload is still NaN there, and re-encoding passes it on.
        pair = [made.payloads[0], clean.payloads[0]]
        assert np.all(np.isnan(ops.decode_sum(pair, codec, elements, factor=0.5)) == lost)
        again = ops.recode(pair, np.ones_like(x), codec, elements, factor=0.5)
        assert np.all(np.isnan(ops.decode_sum(again.payloads, codec, elements)) == lost)
        assert np.all(again.residual[lost] == 1)
        spoilt.view(np.uint32)[place] = kept


@every_codec
def test_overflow_of_the_sum_with_the_residual_is_noticed(ops: Implementation, codec: Codec):
    x = np.full(70, np.finfo(np.float32).max, np.float32)
    made = ops.encode([x], x, codec)
    assert np.all(np.isnan(ops.decode_sum(made.payloads, codec, 70)[:64]))
    data.same_bits(made.residual, x)


@pytest.mark.parametrize(
    ("codec", "limit"),
    [
        (Codec("bf16"), (2 - 2.0**-7) * 2.0**127),
        (Codec("fp16"), 65504.0),
        (Codec("topk", block=64, keep=1), (2 - 2.0**-7) * 2.0**127),
    ],
    ids=["bf16", "fp16", "topk"],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_large_values_saturate(ops: Implementation, codec: Codec, limit: float, sign: int):
    for v in (np.finfo(np.float32).max, limit * (1 + 2.0**-12), limit):
        with np.errstate(over="ignore"):
            array = np.array([min(v, np.finfo(np.float32).max) * sign], np.float32)
        assert round_trip(ops, codec, array) == np.float32(sign * limit)


def test_fp8_never_makes_an_infinity(ops: Implementation):
    """448 2^119 is the largest it has; the next float32 counts as not finite, as its block might round to 2^128."""
    largest = np.float32(448 * 2.0**119)
    codec, r = Codec("fp8"), np.ones(2, np.float32)
    assert round_trip(ops, codec, np.array([largest, -largest])).tolist() == [largest, -largest]
    for beyond in (np.nextafter(largest, np.float32(np.inf)), np.finfo(np.float32).max):
        made = ops.encode([np.array([1, -beyond], np.float32)], r, codec)
        assert np.all(np.isnan(ops.decode_sum(made.payloads, codec, 2)))
        np.testing.assert_array_equal(made.residual, r)


@every_codec
def test_finite_numbers_never_decode_to_an_infinity(ops: Implementation, codec: Codec):
    """Nor leave one in the residual: it would stay there."""

    @settings(deadline=None, max_examples=6)
    @given(data.numbers(("huge", "wide", "special"), not_finite=0), data.lengths(codec))
    def check(numbers, elements):
        x = numbers.fill(elements)
        made = ops.encode([x], np.zeros_like(x), codec)
        assert not np.any(np.isinf(ops.decode_sum(made.payloads, codec, elements)))
        assert np.all(np.isfinite(made.residual))

    check()


@every_codec
def test_decode_and_sum_is_the_sum_of_what_each_decodes_to(ops: Implementation, codec: Codec):
    @settings(deadline=None, max_examples=6)
    @given(data.numbers(TAME, not_finite=0), data.lengths(codec), st.integers(1, 6))
    def check(numbers, elements, peers):
        payloads = [ops.encode([numbers.fill(elements, i)], None, codec, step=i).payloads[0] for i in range(peers)]
        each = [ops.decode_sum([payload], codec, elements) for payload in payloads]
        total = functools.reduce(oracle.add, each)
        data.same(ops.decode_sum(payloads, codec, elements), total)
        half = np.where(np.abs(total / 2) <= TINY, np.float32(0), total / 2)
        data.same(ops.decode_sum(payloads, codec, elements, factor=0.5), half)
        data.same(ops.decode(payloads[:1], codec, [(elements,)])[0], each[0])

    check()


@every_codec
def test_recode_is_decode_sum_then_encode(ops: Implementation, codec: Codec):
    @settings(deadline=None, max_examples=6)
    @given(data.numbers(data.FLAVOURS), data.lengths(codec), st.integers(1, 4), st.sampled_from([1.0, 0.25, 1 / 3]))
    def check(numbers, elements, peers, factor):
        payloads = [ops.encode([numbers.fill(elements, i)], None, codec, step=i).payloads[0] for i in range(peers)]
        residual = numbers.fill(elements, peers)
        fused = ops.recode(payloads, residual, codec, elements, factor=factor, seed=8, step=9)
        total = ops.decode_sum(payloads, codec, elements, factor=factor)
        separate = ops.encode([total], residual, codec, seed=8, step=9)
        assert fused.payloads == separate.payloads
        data.same_bits(fused.residual, separate.residual)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(fused.norms, separate.norms, rtol=1e-5)

    check()


@every_codec
def test_shards_hold_the_blocks_of_the_whole(ops: Implementation, codec: Codec):
    """How a vector is cut into shards or tensors changes nothing, random numbers included."""

    @settings(deadline=None, max_examples=6)
    @given(data.numbers(), data.lengths(codec), st.integers(2, 4), st.lists(st.floats(0, 1), max_size=3))
    def check(numbers, elements, shards, places):
        x, r = numbers.fill(elements), numbers.fill(elements, 1)
        whole = ops.encode([x], r, codec, seed=5, step=6)
        made = ops.encode(data.cut(x, places), r, codec, shards=shards, seed=5, step=6)
        data.same_bits(made.residual, whole.residual)
        decoded = ops.decode(made.payloads, codec, [(elements,)])[0]
        data.same(decoded, ops.decode_sum(whole.payloads, codec, elements))
        if elements:
            np.testing.assert_allclose(made.norms, whole.norms, rtol=1e-5)

    check()


@every_codec
def test_norms(ops: Implementation, codec: Codec):
    """Squared norms of the input, not of its sum with the residual, and of the new residual."""
    elements = 5 * codec.block + 77
    x, r = np.random.default_rng(1).normal(size=(2, elements)).astype(np.float32)
    made = ops.encode(np.split(x, [11, 200]), r, codec, shards=2)
    np.testing.assert_allclose(made.norms, [squares(x), squares(made.residual)], rtol=2e-6)
    assert ops.encode([x], None, codec).norms[1] == 0

    payloads = ops.encode([x], None, codec).payloads
    again = ops.recode(payloads, r[:5], codec, elements, factor=0.5, valid=5)
    scaled = ops.decode_sum(payloads, codec, elements, factor=0.5)[:5]
    np.testing.assert_allclose(again.norms, [squares(scaled), squares(again.residual)], rtol=2e-6)


def squares(values: np.ndarray) -> float:
    return np.sum(np.square(values.astype(np.float64)))


def test_norm_of_tensors(ops: Implementation):
    x = np.random.default_rng(2).normal(size=3000).astype(np.float32)
    parts = [x[:1].reshape(()), x[1:1].reshape(0, 7), x[1:].reshape(-1, 1)]
    norm, finite = ops.norm_squared(parts)
    assert finite
    assert norm == pytest.approx(np.sum(np.square(x.astype(np.float64))), rel=1e-6)
    assert ops.norm_squared([]) == (0.0, True)
    assert ops.norm_squared([np.full(3, 2e38, np.float32)]) == (math.inf, True)
    for bad in data.NOT_FINITE:
        x[1234] = bad
        assert not ops.norm_squared([x[:2000], x[2000:]])[1]


@pytest.mark.parametrize("sign", [1, -1])
def test_of_equal_magnitudes_the_first_are_kept(ops: Implementation, sign: int):
    codec = Codec("topk", block=64, keep=5)
    v = np.where(np.arange(128) % 3 == 1, np.float32(-2), np.float32(1)) * np.float32(sign)
    v[[70, 71]] = 7, -7
    kept = np.flatnonzero(round_trip(ops, codec, v))
    np.testing.assert_array_equal(kept, [1, 4, 7, 10, 13, 64, 67, 70, 71, 73])
    level = round_trip(ops, codec, np.full(100, sign, np.float32))
    np.testing.assert_array_equal(np.flatnonzero(level), [0, 1, 2, 3, 4, 64, 65, 66, 67, 68])


def test_the_mean_magnitude_of_sign_counts_no_padding(ops: Implementation):
    v = np.array([1, -3, 0, 4] * 17, np.float32)  # 64 and 4 elements
    decoded = round_trip(ops, Codec("sign", block=64, scale="float32"), v)
    np.testing.assert_array_equal(decoded, np.where(v < 0, -2, 2))


@pytest.mark.parametrize("codec", data.STOCHASTIC, ids=data.identifier)
def test_stochastic_rounding_is_unbiased(ops: Implementation, codec: Codec):
    """The same block over and over, at many places and steps: the mean is the value, the spread that of a coin."""
    copies, levels = 500, 2 ** (codec.bits - 1) - 1
    v = np.random.default_rng(5).uniform(-1, 1, codec.block).astype(np.float32)
    v[0] = 1
    exact = v.astype(np.float64) * levels
    many = [round_trip(ops, codec, np.tile(v, copies), seed=77, step=step) for step in range(4)]
    drawn = np.concatenate(many).reshape(-1, codec.block).astype(np.float64) * levels
    up = exact - np.floor(exact)
    deviation = np.sqrt(np.maximum(up * (1 - up), 1e-4) / len(drawn))
    # A scale has few digits, and 16 random bits end somewhere: up to 2^-9 of the value, and 2^-16 of a step.
    offset = np.abs(exact) * 2.0**-9 + 2.0**-16
    assert np.all(np.abs(drawn.mean(axis=0) - exact) < 6 * deviation + offset)
    assert np.mean(drawn.var(axis=0)) == pytest.approx(np.mean(up * (1 - up)), rel=0.05)
    # Elements are independent of each other, and so is the error of their sum.
    errors = (drawn - exact).sum(axis=1)
    assert np.std(errors) == pytest.approx(math.sqrt(np.sum(up * (1 - up))), rel=0.1)


@pytest.mark.parametrize("codec", data.STOCHASTIC, ids=data.identifier)
def test_stochastic_rounding_depends_on_seed_step_and_place_alone(ops: Implementation, codec: Codec):
    v = np.random.default_rng(6).uniform(-1, 1, 4 * codec.block).astype(np.float32)
    v[codec.block :] = np.tile(v[: codec.block], 3)

    def draw(seed: int, step: int) -> np.ndarray:
        return blocks_of(codec, round_trip(ops, codec, v, seed, step))

    first = draw(1, 2)
    np.testing.assert_array_equal(first, draw(1, 2))
    others = [draw(2, 1), draw(1, 3), draw(0, 2), draw(1 + 2**32, 2), draw(1, 2 + 2**32), draw(2**63 + 1, 2)]
    distinct = {rows[i].tobytes() for rows in [first, *others] for i in range(4)}
    assert len(distinct) == 4 * 7
    # The same block elsewhere in the vector: by recoding at its place.
    payload = ops.encode([v[: codec.block]], None, codec, seed=3, step=4).payloads
    clean = ops.decode_sum(payload, codec, codec.block)
    at = ops.recode(payload, None, codec, codec.block, begin=2 * codec.block, seed=1, step=2).payloads
    whole = ops.encode([np.tile(clean, 3)], None, codec, seed=1, step=2).payloads
    expected = ops.decode_sum(whole, codec, 3 * codec.block)[2 * codec.block :]
    np.testing.assert_array_equal(ops.decode_sum(at, codec, codec.block), expected)

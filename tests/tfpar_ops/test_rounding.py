"""The roundings and random numbers that codecs are made of: reference and oracle against ml_dtypes and NumPy."""

from __future__ import annotations

import functools

from tests.tfpar_ops import data, oracle
from tfpar_ops.reference import bits, philox

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

# Random123's known answers for Philox4x32-10: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@functools.cache
def hard_numbers() -> np.ndarray:
    """Every bf16, half and E4M3 number, the middles between them, and the next float32 on either side of each."""
    bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    fp8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = []
    for numbers in (bf16, half, fp8):
        sizes = np.unique(np.abs(numbers[np.isfinite(numbers)])).astype(np.float64)
        with np.errstate(over="ignore"):
            found += [sizes.astype(np.float32), ((sizes[1:] + sizes[:-1]) / 2).astype(np.float32)]
    sizes = np.concatenate([*found, [np.finfo(np.float32).max]]).astype(np.float32)
    patterns = np.unique(sizes[np.isfinite(sizes)]).view(np.uint32)
    sizes = np.concatenate([patterns, patterns + 1, np.maximum(patterns, 1) - 1]).view(np.float32)
    # What codecs encode has no denormals, and no -0.
    sizes = np.unique(sizes[(sizes >= 2.0**-126) & np.isfinite(sizes)])
    return np.concatenate([[np.float32(0)], sizes, -sizes]).astype(np.float32)


def test_bf16():
    v = hard_numbers()
    codes = bits.bf16(bits.of(tf.constant(v))).numpy().astype(np.uint16)
    expected = v.astype(ml_dtypes.bfloat16).view(np.uint16)
    saturated = np.where(expected & 0x7FFF == 0x7F80, expected - 1, expected)
    np.testing.assert_array_equal(codes, saturated)
    np.testing.assert_array_equal(oracle.bf16_codes(v), saturated)


def test_half():
    v = hard_numbers()
    codes = bits.half(bits.of(tf.constant(v))).numpy().astype(np.uint16)
    with np.errstate(over="ignore"):
        expected = v.astype(np.float16).view(np.uint16)
    saturated = np.where(expected & 0x7FFF == 0x7C00, expected - 1, expected)
    np.testing.assert_array_equal(codes, saturated)
    np.testing.assert_array_equal(oracle.fp16_codes(v), saturated)


def test_e4m3():
    v = hard_numbers()
    v = v[np.abs(v) <= 448]
    codes = bits.e4m3(bits.of(tf.constant(v))).numpy().astype(np.uint8)
    expected = v.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    expected = np.where(expected == 0x80, 0, expected)  # zero has no sign here
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(oracle.e4m3_codes(v), expected)


def test_values_of_all_codes():
    codes = np.arange(1 << 16)
    wide = tf.constant(codes, tf.int32)
    data.same(bits.bf16_value(wide).numpy(), codes.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32))
    data.same(bits.half_value(wide).numpy(), codes.astype(np.uint16).view(np.float16).astype(np.float32))
    narrow = np.arange(256, dtype=np.uint8)
    expected = narrow.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    data.same(bits.e4m3_value(tf.constant(narrow, tf.int32)).numpy(), expected)
    data.same(oracle.E4M3.astype(np.float32), expected)


def test_short():
    """17 significant bits: the float32 itself where it has no more, else the nearer neighbour."""
    v = np.abs(hard_numbers())
    short = bits.as_float(bits.short(bits.of(tf.constant(v)))).numpy()
    assert not np.any(short.view(np.uint32) & 0x7F)
    np.testing.assert_array_equal(short, oracle.significant(v, 17, oracle.SHORT_LARGEST))
    few = v[v.view(np.uint32) & 0x7F == 0]
    np.testing.assert_array_equal(bits.as_float(bits.short(bits.of(tf.constant(few)))), few)


@pytest.mark.parametrize("pattern", data.NOT_FINITE.view(np.uint32))
def test_what_is_not_finite_has_one_code(pattern: np.uint32):
    number = tf.constant(np.array([pattern]).view(np.int32))
    assert bits.bf16(number).numpy() == [0x7FC0]
    assert bits.half(number).numpy() == [0x7E00]
    assert bits.short(bits.magnitude(number)).numpy() == [0x7FC00000]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes(width: int):
    codes = np.random.default_rng(width).integers(0, 1 << width, (3, 128))
    packed = bits.pack_planes(tf.constant(codes, tf.int32), width)
    assert [row.tobytes() for row in packed.numpy()] == [oracle.planes(row, width) for row in codes]
    np.testing.assert_array_equal(bits.unpack_planes(packed, width), codes)


@pytest.mark.parametrize("width", [8, 16])
def test_codes_of_whole_bytes(width: int):
    codes = np.random.default_rng(width).integers(0, 1 << width, (3, 20))
    packed = bits.pack(tf.constant(codes, tf.int32), width)
    np.testing.assert_array_equal(packed.numpy().view(f"<u{width // 8}"), codes)
    np.testing.assert_array_equal(bits.unpack(packed, width), codes)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_known_answers(counter: tuple, key: tuple, words: tuple):
    uint32 = functools.partial(tf.constant, dtype=tf.uint32)
    found = philox.philox(tuple(map(uint32, counter)), tuple(map(uint32, key)))
    assert tuple(int(word) for word in found) == words
    assert oracle.philox(counter, key) == words


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**55), st.sampled_from([64, 512]))
def test_offsets_of_any_block(seed: int, step: int, number: int, block: int):
    seed_step = tf.constant(np.array([seed, step], np.uint64).view(np.int64))
    found = philox.rounding_offsets(seed_step, tf.constant(number, tf.int64), 2, block).numpy()
    np.testing.assert_array_equal(found[0], oracle.offsets(block, number, seed, step))
    np.testing.assert_array_equal(found[1], oracle.offsets(block, number + 1, seed, step))


def test_offsets_across_the_low_word_of_the_counter():
    """Lanes count in 64 bits: block 2^29 of 64 elements starts at lane 2^32."""
    seed_step = tf.constant([1, 2], tf.int64)
    found = philox.rounding_offsets(seed_step, tf.constant(2**29 - 1, tf.int64), 2, 64).numpy()
    np.testing.assert_array_equal(found[0], oracle.offsets(64, 2**29 - 1, 1, 2))
    np.testing.assert_array_equal(found[1], oracle.offsets(64, 2**29, 1, 2))
    assert not np.array_equal(found[1], oracle.offsets(64, 0, 1, 2))

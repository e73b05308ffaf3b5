"""Calls that cannot be: native operations and reference refuse the same ones, with the same kind of error, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.tfpar_ops import data, implementations, oracle
from tfpar_ops.codecs import Codec

import keras
import numpy as np
import pytest
import tensorflow as tf

INT4 = Codec("int4", block=64)
STOCHASTIC = Codec("int4", block=64, rounding="stochastic")
TOPK = Codec("topk", block=64, keep=3)
BAD = tf.errors.InvalidArgumentError
WORDS = INT4.payload_bytes(100) // 4


def vector(elements: int = 100) -> tf.Tensor:
    return tf.zeros([elements])


def payloads(codec: Codec = INT4, count: int = 1) -> tf.Tensor:
    return implementations.words_of([oracle.encode(codec, data.values(100, "normal", 1))[0]] * count)


def slices() -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.zeros([2, 50]), tf.constant([0, 1]), tf.constant([2, 50]))


def unknown(shape: list[int | None] | None, call: Callable[[tf.Tensor], Any], value: Any, dtype=tf.float32) -> Any:
    """Calls with a tensor of which no more is known than this, in a function."""
    function = tf.function(call, input_signature=[tf.TensorSpec(shape, dtype)], autograph=False)
    return function(tf.constant(value, dtype))


@dataclasses.dataclass(frozen=True)
class Refused:
    """A call, and the error that all implementations answer it with."""

    error: type[Exception]
    says: str
    call: Callable[[ModuleType], Any]


V, T = ValueError, TypeError
REFUSED = [
    # What is encoded.
    Refused(T, "tensors: an EagerTensor; expected a list of float32", lambda m: m.encode(vector(), None, INT4)),
    Refused(T, "tensors: a ndarray; expected a list", lambda m: m.encode(np.zeros(9, np.float32), None, INT4)),
    Refused(T, "tensors: None; expected a list", lambda m: m.norm_squared(None)),
    Refused(T, r"tensors\[1\]: None; expected a float32 tensor", lambda m: m.encode([vector(), None], None, INT4)),
    Refused(
        T,
        r"tensors\[0\]: dtype float64; expected float32, tf.cast makes it so",
        lambda m: m.encode([np.zeros(9)], None, INT4),
    ),
    Refused(T, r"tensors\[1\]: dtype int32", lambda m: m.norm_squared([vector(), tf.constant([1])])),
    Refused(T, r"tensors\[0\]: dtype string; expected float32$", lambda m: m.norm_squared(["gradient"])),
    Refused(T, r"tensors\[0\]: tf.IndexedSlices; expected a dense", lambda m: m.encode([slices()], None, INT4)),
    Refused(T, r"tensors\[0\]: tf.IndexedSlices", lambda m: m.encode_into(tf.Variable(vector()), [slices()], INT4)),
    Refused(T, r"tensors\[0\]: tf.IndexedSlices", lambda m: m.norm_squared([slices()])),
    Refused(
        V,
        r"tensors\[0\]: shape \(None,\) is not static.*tf.ensure_shape",
        lambda m: unknown([None], lambda x: m.encode([x], None, INT4), np.zeros(3)),
    ),
    Refused(V, "is not static", lambda m: unknown(None, lambda x: m.norm_squared([x]), np.zeros(3))),
    # Codecs.
    Refused(T, "codec: 'int4' is a str; expected a tfpar_ops.Codec", lambda m: m.encode([vector()], None, "int4")),
    Refused(T, "codec: None is None", lambda m: m.decode_sum(payloads(), None, 100)),
    Refused(T, "codec: 4 is an int", lambda m: m.decode(payloads(), 4, [[100]])),
    Refused(T, "codec: 'sign' is a str", lambda m: m.recode(payloads(), None, "sign", 100)),
    # Shards.
    Refused(V, "shards=0; expected at least 1", lambda m: m.encode([vector()], None, INT4, shards=0)),
    Refused(T, "shards=2.0 is a float", lambda m: m.encode([vector()], None, INT4, shards=2.0)),
    Refused(T, "shards=True is a bool", lambda m: m.encode([vector()], None, INT4, shards=True)),
    Refused(V, "shard_elements=-1", lambda m: m.encode([vector()], None, INT4, shard_elements=-1)),
    Refused(
        V,
        "shard_elements=60 is not a multiple of the block size, 64",
        lambda m: m.encode([vector()], None, INT4, shards=2, shard_elements=60),
    ),
    Refused(
        V,
        "shards=1 of shard_elements=64 do not hold 100 elements; at least 100",
        lambda m: m.encode([vector()], None, INT4, shard_elements=64),
    ),
    Refused(
        V,
        r"more than 2\^63 bytes",
        lambda m: m.encode([vector()], None, INT4, shards=1 << 40, shard_elements=1 << 40),
    ),
    # Residuals.
    Refused(V, r"residual: shape \(99,\); expected \[100\]", lambda m: m.encode([vector()], vector(99), INT4)),
    Refused(V, r"residual: shape \(100, 1\)", lambda m: m.encode([vector()], tf.zeros([100, 1]), INT4)),
    Refused(T, "residual: dtype float64", lambda m: m.encode([vector()], np.zeros(100), INT4)),
    Refused(T, "residual: tf.IndexedSlices", lambda m: m.encode([vector()], slices(), INT4)),
    Refused(
        V,
        r"residual: shape \(None,\); expected \[100\]",
        lambda m: unknown([None], lambda r: m.encode([vector()], r, INT4), np.zeros(100)),
    ),
    Refused(V, "residual: shape", lambda m: unknown(None, lambda r: m.recode(payloads(), r, INT4, 100), np.zeros(100))),
    Refused(
        T,
        r"residual: None; expected a tf.Variable, float32 \[100\]; tfpar_ops.encode takes",
        lambda m: m.encode_into(None, [vector()], INT4),
    ),
    Refused(
        T,
        r"residual: an EagerTensor; expected a tf.Variable.*tfpar_ops.encode",
        lambda m: m.encode_into(vector(), [vector()], INT4),
    ),
    Refused(
        T,
        "residual: a ndarray; expected a tf.Variable.*tfpar_ops.recode",
        lambda m: m.recode_into(np.zeros(100, np.float32), payloads(), INT4, 100),
    ),
    Refused(
        T,
        "residual: a Variable; expected a tf.Variable.*give the .value of a Keras variable",
        lambda m: m.encode_into(keras.Variable(np.zeros(100)), [vector()], INT4),
    ),
    Refused(T, "residual: dtype float64", lambda m: m.encode_into(tf.Variable(np.zeros(100)), [vector()], INT4)),
    Refused(
        V,
        r"residual: shape \(99,\); expected \[100\]",
        lambda m: m.encode_into(tf.Variable(vector(99)), [vector()], INT4),
    ),
    Refused(
        V,
        r"residual: shape \(100,\); expected \[60\]",
        lambda m: m.recode_into(tf.Variable(vector()), payloads(), INT4, 100, valid=60),
    ),
    # Seeds.
    Refused(V, "seed_step: missing", lambda m: m.encode([vector()], None, STOCHASTIC)),
    Refused(V, "seed_step: given", lambda m: m.encode([vector()], None, INT4, seed_step=[1, 2])),
    Refused(V, r"seed_step: shape \(3,\)", lambda m: m.encode([vector()], None, STOCHASTIC, seed_step=[1, 2, 3])),
    Refused(T, "seed_step: a list", lambda m: m.encode([vector()], None, STOCHASTIC, seed_step=[1.5, 2])),
    Refused(
        T,
        "seed_step: dtype int32; expected int64",
        lambda m: m.encode([vector()], None, STOCHASTIC, seed_step=tf.constant([1, 2])),
    ),
    # Payloads.
    Refused(T, "payloads: dtype float32", lambda m: m.decode_sum(tf.bitcast(payloads(), tf.float32), INT4, 100)),
    Refused(T, "payloads: None", lambda m: m.decode(None, INT4, [[100]])),
    Refused(T, "payloads: dtype uint8", lambda m: m.decode(np.zeros([1, 80], np.uint8), INT4, [[100]])),
    Refused(V, r"payloads: shape \(\d+,\); expected", lambda m: m.decode_sum(payloads()[0], INT4, 100)),
    Refused(V, r"payloads: shape \(0, ", lambda m: m.decode_sum(payloads()[:0], INT4, 100)),
    Refused(V, r"payloads: shape \(0, ", lambda m: m.decode(payloads()[:0], INT4, [[100]])),
    Refused(V, rf"expected \[peers >= 1, {WORDS}\]", lambda m: m.recode(payloads()[:, 4:], None, INT4, 100)),
    Refused(
        V,
        rf"payloads: shape \(None, {WORDS}\) is not static; set it with tf.ensure_shape",
        lambda m: unknown([None, WORDS], lambda p: m.decode(p, INT4, [[100]]), payloads(), tf.int32),
    ),
    Refused(
        V,
        rf"payloads: shape \(1, None\) is not static; set it with tf.ensure_shape to \[peers >= 1, {WORDS}\]",
        lambda m: unknown([1, None], lambda p: m.decode_sum(p, INT4, 100), payloads(), tf.int32),
    ),
    Refused(
        V,
        "payloads: shape <unknown> is not static; set it with tf.ensure_shape",
        lambda m: unknown(None, lambda p: m.recode(p, None, INT4, 100).payload, payloads(), tf.int32),
    ),
    # Shapes and numbers.
    Refused(V, r"shapes\[0\]: \(None,\) is not static", lambda m: m.decode(payloads(), INT4, [[None]])),
    Refused(V, r"shapes\[1\]: <unknown> is not static", lambda m: m.decode(payloads(), INT4, [[9], None])),
    Refused(T, r"shapes\[0\]: 100 is no shape", lambda m: m.decode(payloads(), INT4, [100])),
    Refused(T, r"shapes\[0\]: 'ab' is no shape", lambda m: m.decode(payloads(), INT4, ["ab"])),
    Refused(T, "shapes: an int; expected a list", lambda m: m.decode(payloads(), INT4, 100)),
    Refused(V, "elements=-1; expected at least 0", lambda m: m.decode_sum(payloads(), INT4, -1)),
    Refused(T, "elements=100.0 is a float", lambda m: m.recode(payloads(), None, INT4, 100.0)),
    Refused(T, "elements=<tf.Tensor", lambda m: m.decode_sum(payloads(), INT4, tf.constant(100))),
    Refused(
        V, r"valid=101 is not between 0 and elements=100", lambda m: m.recode(payloads(), None, INT4, 100, valid=101)
    ),
    Refused(T, r"valid=1.5 is a float", lambda m: m.recode(payloads(), None, INT4, 100, valid=1.5)),
    Refused(
        V, r"factor: shape \(2,\); expected \[\]", lambda m: m.decode_sum(payloads(), INT4, 100, factor=[1.0, 2.0])
    ),
    Refused(T, "factor: None", lambda m: m.decode(payloads(), INT4, [[100]], factor=None)),
    Refused(
        T,
        "factor: dtype float64",
        lambda m: m.recode(payloads(), None, INT4, 100, factor=tf.constant(0.5, tf.float64)),
    ),
    # Where a shard begins: known, or known when it runs.
    *(
        Refused(
            V,
            rf"begin={int(begin)}( is not a multiple of the block size, 64|; expected at least 0)",
            lambda m, begin=begin: m.recode(payloads(), None, INT4, 100, begin=begin),
        )
        for begin in (-64, 1, 65, np.int64(32), np.array(32))
    ),
    Refused(T, "begin=64.0 is a float", lambda m: m.recode(payloads(), None, INT4, 100, begin=64.0)),
    Refused(T, "begin: dtype float32", lambda m: m.recode(payloads(), None, INT4, 100, begin=tf.constant(64.0))),
    Refused(V, r"begin: shape \(1,\)", lambda m: m.recode(payloads(), None, INT4, 100, begin=tf.constant([64]))),
    *(
        Refused(
            BAD,
            rf"begin={begin} is not a multiple of the block, 64",
            lambda m, begin=begin: m.recode(payloads(), None, INT4, 100, begin=tf.constant(begin)),
        )
        for begin in (-64, 1, 65)
    ),
    Refused(
        BAD,
        r"begin=\]? ?\[?32\]? ?\[? is not a multiple of the block, 64",
        lambda m: unknown([], lambda begin: m.recode(payloads(), None, INT4, 100, begin=begin).payload, 32, tf.int32),
    ),
    Refused(
        BAD,
        "",
        lambda m: unknown(
            None, lambda begin: m.recode(payloads(), None, INT4, 100, begin=begin).payload, [64], tf.int64
        ),
    ),
    Refused(BAD, "", lambda m: unknown(None, lambda f: m.decode_sum(payloads(), INT4, 100, factor=f), [1.0])),
    # Content: of another codec, length, or out of range; with what was found and what was expected.
    Refused(BAD, r"elements.* (99|100)\D.*expected.*100", lambda m: m.decode_sum(other_header(8, 99), INT4, 100)),
    Refused(BAD, r"kind.* 6\D.*expected.*5\D", lambda m: m.decode(other_header(4, 6), INT4, [[100]])),
    Refused(BAD, r"log2 of block.* 7\D.*expected.*6\D", lambda m: m.recode(other_header(5, 7), None, INT4, 100)),
    Refused(BAD, r"payloads\[1\]", lambda m: m.decode_sum(tf.concat([payloads(), other_header(5, 7)], 0), INT4, 100)),
    Refused(
        BAD,
        r"payloads\[.*1.*\]: topk position .*77.*, in block .*0.*, is not below the block size, 64",
        lambda m: m.decode_sum(tf.concat([payloads(TOPK), outside()], 0), TOPK, 100),
    ),
    Refused(BAD, "topk position 77, in block 0, is not", lambda m: m.decode(outside(), TOPK, [[100]])),
    Refused(
        BAD,
        "topk position 77, in block 0, is not",
        lambda m: m.recode(tf.repeat(outside(), 2, axis=0), None, TOPK, 100),
    ),
]


def other_header(place: int, value: int) -> tf.Tensor:
    content = bytearray(payloads().numpy().tobytes())
    content[place] = value
    return implementations.words_of([bytes(content)])


def outside() -> tf.Tensor:
    """A topk payload with a position past its block."""
    content = bytearray(payloads(TOPK).numpy().tobytes())
    content[16:18] = (77).to_bytes(2, "little")
    return implementations.words_of([bytes(content)])


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.says[:60] or refused.error.__name__)
def test_refused(ops: implementations.Implementation, refused: Refused):
    with pytest.raises(refused.error, match=f"(?s){refused.says}"):
        refused.call(ops.module)


def test_what_tensors_can_be_made_of_is_taken(ops: implementations.Implementation):
    """NumPy, lists, Keras variables and any kind of integer give what tensors and ints give."""
    x = data.values(100, "normal", 3)
    expected = ops.module.encode(
        [tf.constant(x)], tf.ones([100]), STOCHASTIC, shards=2, seed_step=tf.constant([1, 2], tf.int64)
    )
    for tensors, residual in (
        ([x], np.ones(100, np.float32)),
        ([x.tolist()], [1.0] * 100),
        ((keras.Variable(x), tf.zeros([0])), tf.Variable(tf.ones([100]))),
    ):
        made = ops.module.encode(tensors, residual, STOCHASTIC, shards=np.int32(2), seed_step=np.array([1, 2]))
        np.testing.assert_array_equal(made.payload, expected.payload)
        data.same_bits(made.residual.numpy(), expected.residual.numpy())

    words = payloads(count=2)
    total = ops.module.decode_sum(words, INT4, 100, factor=0.5)
    for factor in (np.float32(0.5), np.float64(0.5), np.array(0.5), tf.constant(0.5), tf.Variable(0.5)):
        data.same(ops.module.decode_sum(words.numpy(), INT4, np.int64(100), factor=factor).numpy(), total.numpy())
    np.testing.assert_array_equal(
        ops.module.decode(words.numpy()[:1], INT4, [tf.TensorShape([10, 10])])[0].shape, [10, 10]
    )
    expected = ops.module.recode(words, None, STOCHASTIC, 100, begin=128, valid=60, seed_step=[1, 2])
    for begin in (np.int64(128), np.array(128), tf.constant(128), tf.constant(128, tf.int64), tf.Variable(128)):
        made = ops.module.recode(words, None, STOCHASTIC, 100, begin=begin, valid=np.uint8(60), seed_step=[1, 2])
        np.testing.assert_array_equal(made.payload, expected.payload)

"""Errors of the native operations: attributes, foreign payloads, shards and sizes that cannot be."""

from __future__ import annotations

import itertools

import tfpar_ops
from tests.tfpar_ops.kernels.harness import INT4, raw, residual
from tfpar_ops import Codec
from tfpar_ops.library import library

import numpy as np
import pytest
import tensorflow as tf

TOPK = Codec("topk", block=64, keep=5)

# With a GPU, `make gpu-test`.
on_the_cpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="a GPU gives NaN, as an error would mean waiting for it"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "quantize"}, "not in the list of allowed values"),
        ({"kind": "int4", "block": 100}, "block=100; allowed"),
        ({"kind": "sign", "block": 2**40}, "block=.* allowed"),
        ({"kind": "bf16", "block": 512}, "block=512"),
        ({"kind": "bf16", "block": 1024, "scale": "float32"}, "scale"),
        ({"kind": "fp8", "rounding": "stochastic"}, "rounding|stochastic"),
        ({"kind": "topk", "keep": 0}, "keep=0; allowed"),
        ({"kind": "topk", "keep": 513}, "keep=513; allowed"),
        ({"kind": "sign", "shards": 0}, "shards"),
        ({"kind": "sign", "shard_elements": -1}, "shard_elements"),
        (
            {"kind": "sign", "shards": 2, "shard_elements": 500},
            "shard_elements=500 is not a multiple of the block, 512",
        ),
        ({"kind": "sign", "shard_elements": 8}, "shard_elements=8: 1 shards of it do not hold the 9 elements"),
    ],
)
def test_attributes_that_are_not_allowed(options, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        library().operations.tfpar_encode(
            **{"tensors": [tf.zeros([9])], "residual": [], "seed_step": [0, 0], "block": 512, **options},
            measures_norms=True,
        )


def corrupted(payload: tf.Tensor, position: int) -> tf.Tensor:
    """A payload with one byte changed."""
    content = bytearray(payload.numpy().tobytes())
    content[position] ^= 0xFF
    return tf.constant(np.frombuffer(bytes(content), np.int32).reshape(payload.shape))


def every_reader(payload: tf.Tensor, codec: Codec, elements: int):
    """Calls of the operations that read payloads, without the wrappers."""
    both = tf.concat([raw("tfpar_encode", codec, tensors=[tf.zeros([elements])], residual=[], seed_step=[0, 0])[0]], 0)
    payloads = tf.concat([both, payload], 0) if payload.shape[1] == both.shape[1] else payload
    again = {"begin": tf.constant(0, tf.int64), "seed_step": [0, 0], "elements": elements, "valid": elements}
    variable = tf.Variable(tf.zeros([elements]))
    yield lambda: raw("tfpar_decode", codec, payloads=payload, factor=1.0, shapes=[[elements]], N=1)
    yield lambda: raw("tfpar_decode_sum", codec, payloads=payloads, factor=1.0, elements=elements)
    yield lambda: raw("tfpar_recode", codec, payloads=payloads, factor=1.0, residual=[], **again)
    yield lambda: raw("tfpar_recode_resource", codec, payloads=payloads, factor=1.0, residual=variable.handle, **again)


@on_the_cpu
@pytest.mark.parametrize("position", [0, 3, 4, 5, 6, 8, 15])
def test_every_byte_of_a_foreign_header_is_noticed(position):
    payload = corrupted(tfpar_ops.encode([residual(elements=1000)], None, INT4).payload, position)
    for read in every_reader(payload, INT4, 1000):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"payloads\[\d\]: .*expected"):
            read()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"payloads\[0\]: .*expected"):
        tfpar_ops.decode(payload, INT4, [[1000]])


def test_payloads_of_another_length():
    payload = tfpar_ops.encode([residual(elements=1000)], None, INT4).payload
    for wrong in (payload[:, :-4], payload[:, :2], payload[:, :0], tf.pad(payload, [[0, 0], [0, 4]])):
        for read in every_reader(wrong, INT4, 1000):
            with pytest.raises(tf.errors.InvalidArgumentError, match="expected"):
                read()
        with pytest.raises(ValueError, match=f"expected \\[peers >= 1, {payload.shape[1]}\\]"):
            tfpar_ops.decode_sum(wrong, INT4, 1000)
    for read in itertools.islice(every_reader(payload[:0], INT4, 1000), 1):
        with pytest.raises(tf.errors.InvalidArgumentError):
            read()


@on_the_cpu
def test_a_position_outside_of_its_block():
    """Anywhere in the payload: it must not be read as an address."""
    payload = tfpar_ops.encode([residual(elements=6400)], None, TOPK).payload
    for block in (0, 99):
        wrong = corrupted(payload, 16 + 20 * block + 1)  # the high byte of the block's first position
        for read in every_reader(wrong, TOPK, 6400):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"topk position \d+, in block \d+, is not"):
                read()


@pytest.mark.parametrize("begin", [-512, 1, 513])
def test_a_shard_that_begins_within_a_block(begin):
    payload = tfpar_ops.encode([residual(elements=1000)], None, INT4).payload
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"begin={begin} is not a multiple of the block, 512"):
        tfpar_ops.recode(payload, None, INT4, 1000, begin=tf.constant(begin))
    expected = "is not a multiple of the block size, 512" if begin > 0 else "; expected at least 0"
    with pytest.raises(ValueError, match=rf"begin={begin} ?{expected}"):
        tfpar_ops.recode(payload, None, INT4, 1000, begin=begin)


def test_more_valid_elements_than_elements():
    payload = tfpar_ops.encode([residual(elements=1000)], None, INT4).payload
    with pytest.raises(ValueError, match="valid=1001 is not between 0 and elements=1000"):
        tfpar_ops.recode(payload, None, INT4, 1000, valid=1001)
    with pytest.raises(tf.errors.InvalidArgumentError, match="valid=1001 is more than elements=1000"):
        raw("tfpar_recode", payloads=payload, factor=1.0, residual=[], begin=tf.constant(0, tf.int64),
            seed_step=[0, 0], elements=1000, valid=1001)  # fmt: skip


def test_as_many_shapes_as_outputs_also_where_no_shape_function_is_asked():
    codec = Codec("int4")
    payload = tfpar_ops.encode([tf.zeros([1000])], None, codec).payload
    attributes = {"kind": "int4", "block": codec.block, "keep": 0, "scale": "bf16"}
    for outputs, shapes in ((40, [[1000]]), (1, [[500], [500]])):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="shapes"):
            library().operations.tfpar_decode(
                payloads=payload, factor=1.0, N=outputs, shapes=shapes, shard_elements=1000, **attributes
            )


def test_more_elements_than_can_be_counted():
    """Shapes that are whole numbers each, and not together: found before anything is allocated."""
    half = [2**62]
    for build in (raw, tf.function(raw, autograph=False)):
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="more elements together than can be"):
            build("tfpar_decode", payloads=tf.zeros([1, 8], tf.int32), factor=1.0, shapes=[half, half], N=2)

    @tf.function(input_signature=[tf.TensorSpec(half), tf.TensorSpec(half)])
    def encode(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return raw("tfpar_encode", tensors=[x, y], residual=[], seed_step=[0, 0])[0]

    with pytest.raises(ValueError, match="more elements together than can be counted"):
        encode.get_concrete_function()


def test_payloads_beyond_what_can_be_counted():
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        tfpar_ops.encode([tf.zeros([512])], None, Codec("sign"), shards=1 << 40, shard_elements=1 << 40)

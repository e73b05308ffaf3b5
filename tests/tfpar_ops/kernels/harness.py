"""Tensors to encode, and the native operations with and without their wrappers' checks."""

from __future__ import annotations

import tfpar_ops
from tests.tfpar_ops import data
from tfpar_ops import Codec
from tfpar_ops.library import library

import numpy as np
import tensorflow as tf

INT4 = Codec("int4")
CODECS = [
    Codec("bf16"),
    Codec("fp16"),
    Codec("fp8"),
    Codec("int8", scale="float32"),
    Codec("int4", rounding="stochastic"),
    Codec("int2", block=64),
    Codec("sign"),
    Codec("topk", keep=41),
]
# More than a unit of work, and no multiple of anything; parts end within blocks.
SHAPES = [(70_001,), (3, 5, 7), (0,), (), (40_000, 2)]
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)


def seed_step(codec: Codec) -> tf.Tensor | None:
    return tf.constant([12, 34], tf.int64) if codec.rounding == "stochastic" else None


def tensors(seed: int = 0) -> list[tf.Tensor]:
    vector = data.values(ELEMENTS, "normal", seed)
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in SHAPES])
    return [tf.constant(part.reshape(shape)) for part, shape in zip(np.split(vector, ends[:-1]), SHAPES, strict=True)]


def residual(seed: int = 1, elements: int = ELEMENTS) -> tf.Tensor:
    return tf.constant(data.values(elements, "normal", seed))


def assert_same(actual: tfpar_ops.Encoded, expected: tfpar_ops.Encoded) -> None:
    np.testing.assert_array_equal(actual.payload, expected.payload)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-5)
    if actual.residual is not None:
        data.same_bits(actual.residual.numpy(), expected.residual.numpy())


def raw(name: str, codec: Codec = INT4, **arguments):
    """An operation without its Python wrapper, whose checks come first otherwise."""
    if "encode" in name or "recode" in name:
        arguments = {"measures_norms": True, **arguments}
    return getattr(library().operations, name)(kind=codec.kind, block=codec.block, keep=codec.keep, **arguments)

"""Shapes of the native operations that are found before anything runs."""

from __future__ import annotations

from tests.tfpar_ops.kernels.harness import INT4, raw

import pytest
import tensorflow as tf


def shapes_of(build, *specs: tf.TensorSpec) -> list[tf.TensorShape]:
    return [
        output.shape
        for output in tf.nest.flatten(tf.function(build, autograph=False).get_concrete_function(*specs).outputs)
    ]


def test_unknown_shapes_stay_unknown_and_known_ones_are_known():
    seed = [0, 0]
    unknown, words = tf.TensorSpec([None]), INT4.payload_bytes(1024) // 4

    def encode(x: tf.Tensor, shard_elements: int):
        return raw("tfpar_encode", tensors=[x], residual=[], seed_step=seed, shards=2, shard_elements=shard_elements)

    assert [s.as_list() for s in shapes_of(lambda x: encode(x, 0), unknown)] == [[2, None], [0], [2]]
    assert [s.as_list() for s in shapes_of(lambda x: encode(x, 1024), unknown)] == [[2, words], [0], [2]]
    assert [s.as_list() for s in shapes_of(lambda x: encode(x, 0), tf.TensorSpec([2000]))] == [[2, words], [0], [2]]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "tfpar_encode",
            {"tensors": [(1000,)], "residual": (999,), "seed_step": [0, 0]},
            "999 elements, expected 1000",
        ),
        ("tfpar_encode", {"tensors": [(1000,)], "residual": (0,), "seed_step": [0]}, "1"),
        ("tfpar_encode", {"tensors": [(1000,)], "residual": (1, 1000), "seed_step": [0, 0]}, "rank 1"),
        (
            "tfpar_encode",
            {"tensors": [(1000,)], "residual": (0,), "seed_step": [0, 0], "measures_norms": [True]},
            "rank 0",
        ),
        ("tfpar_decode_sum", {"payloads": (2, 72), "factor": 1.0, "elements": 1025}, "72 words, expected 200"),
        ("tfpar_decode_sum", {"payloads": (72,), "factor": 1.0, "elements": 512}, "rank 2"),
        ("tfpar_decode", {"payloads": (1, 72), "factor": 1.0, "shapes": [[9]], "N": 2}, "1 of them for 2 outputs"),
        ("tfpar_decode", {"payloads": (1, 72), "factor": 1.0, "shapes": [[None]], "N": 1}, "not fully defined"),
        ("tfpar_decode", {"payloads": (2, 72), "factor": 1.0, "shapes": [[99]], "N": 1, "shard_elements": 9}, "hold"),
    ],
)
def test_shapes_that_do_not_fit_are_found_while_the_graph_is_built(name, arguments, message):
    def tensor(argument, key):
        if key == "tensors":
            return [tf.zeros(shape) for shape in argument]
        if isinstance(argument, tuple):
            return tf.zeros(argument, tf.int32 if key == "payloads" else tf.float32)
        return argument

    @tf.function(autograph=False)
    def build():
        return raw(name, **{key: tensor(argument, key) for key, argument in arguments.items()})

    with pytest.raises(ValueError, match=message):
        build.get_concrete_function()

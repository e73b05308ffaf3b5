"""Which saved weights a model takes, by the names of both."""

from __future__ import annotations

from tfpar.checkpoint import names, run_state

import keras
import numpy as np
import pytest


def kernels(*layers: str) -> list[str]:
    return [f"{layer}/kernel" for layer in layers]


@pytest.mark.parametrize(
    ("own", "saved", "taken"),
    [
        # Keras counted from another number, and the models have different numbers of layers.
        (["dense_3", "dense_4", "dense_5"], ["dense", "dense_1"], ["dense", "dense_1", None]),
        (["dense_1", "dense_2", "dense_3"], ["dense", "dense_1"], ["dense", "dense_1", None]),
        (["dense_1", "dense_2"], ["dense", "dense_1", "dense_2"], ["dense", "dense_1"]),
        (["dense", "dense_1", "dense_2"], ["dense_1", "dense_2"], ["dense_1", "dense_2", None]),
        (["dense_9", "dense_10", "dense_11"], ["dense_10", "dense_11"], ["dense_10", "dense_11", None]),
        (["s_1/dense_7", "s_1/dense_8"], ["s/dense"], ["s/dense", None]),
        (["b_2/qkv", "b_3/qkv", "dense_7"], ["b/qkv", "b_1/qkv", "dense", "dense_1"], ["b/qkv", "b_1/qkv", "dense"]),
        (["a/d_1", "b/d_2"], ["a/d", "b/d_1", "b/d_2"], ["a/d", "b/d_1"]),
        # Without the model's name, as Keras reads a `Sequential` from a file, or with another one.
        (["s_1/dense_7", "s_1/dense_8"], ["dense"], ["dense", None]),
        (["net/body", "net/new"], ["old/body", "old/head", "old/more"], ["old/body", None]),
        # Names of a user.
        (["conv_2", "head"], ["conv_1", "conv_2", "head"], ["conv_2", "head"]),
        (["conv_1", "conv_2", "conv_4"], ["conv_1", "conv_2", "conv_3", "conv_5"], ["conv_1", "conv_2", None]),
        (["conv_2", "conv_3", "conv_5"], ["conv_1", "conv_2", "conv_3", "old"], ["conv_2", "conv_3", None]),
        (["up_4", "up_3", "up_2"], ["up_3", "up_2"], [None, "up_3", "up_2"]),
        (["conv_2", "dense_4"], ["conv_1", "conv_2", "dense"], ["conv_2", "dense"]),
    ],
)
def test_each_weight_takes_the_one_in_its_place(own, saved, taken):
    taken = [name and f"{name}/kernel" for name in taken]
    expected = {one: other for one, other in zip(kernels(*own), taken, strict=True) if other}
    assert names.matched(kernels(*own), kernels(*saved)) == expected


def test_paths_that_repeat_are_matched_by_occurrence():
    assert names.matched(["fc/b", "fc/b#1", "new/b"], ["fc/b#1", "fc/b", "old/b", "old/b#1"]) == {
        "fc/b": "fc/b",
        "fc/b#1": "fc/b#1",
    }


def test_a_deeper_model_takes_each_layer_from_its_place(tmp_path):
    """All kernels have one shape: only the names tell them apart."""

    def deep(layers: int) -> keras.Model:
        inputs = outputs = keras.Input((4,))
        for _ in range(layers):
            outputs = keras.layers.Dense(4)(outputs)
        return keras.Model(inputs, outputs)

    source, target, said = deep(2), deep(3), []
    source.save(tmp_path / "model.keras")
    run_state.warm_start(target, str(tmp_path / "model.keras"), said.append)
    for theirs, ours in zip(source.weights, target.weights, strict=False):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    one, two, last = (layer.name for layer in target.layers[1:])
    others = f"{one} from {source.layers[1].name}, {two} from {source.layers[2].name}"
    assert said[0].endswith(
        f": 4 of 6 weights taken, also under other names: {others}; keeping their initial values: {last}/bias, "
        f"{last}/kernel"
    )

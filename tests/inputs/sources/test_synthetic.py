"""Generated examples: a pure function of the index, different between splits, and learnable."""

from __future__ import annotations

from tests.inputs.helpers import fetch_all
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import build_source

import numpy as np
import pytest


def build(spec, split="train", seed=0, **options):
    return build_source(InputConfig(dataset=f"synthetic:{spec}", **options), split, seed)


@pytest.mark.parametrize("spec", ["9x7x3:5:300", "20:5:300", "tokens:500:300"])
def test_examples_depend_on_index_and_seed_alone(spec):
    source = build(spec)
    x, y = fetch_all(source)
    again = source.fetch(np.array([7, 299, 7]))
    assert np.array_equal(again[0], x[[7, 299, 7]])
    assert np.array_equal(again[1], y[[7, 299, 7]])
    other_split, other_seed = fetch_all(build(spec, "validation"))[0], fetch_all(build(spec, seed=1))[0]
    assert len(other_split) == 30
    rows = {row.tobytes() for row in x}
    assert len(rows) > 250
    assert not np.array_equal(x, other_seed)
    if not spec.startswith("tokens"):
        assert not rows & {row.tobytes() for row in other_split}


def test_images_are_between_0_and_1():
    source = build("16x16x3")
    x, y = fetch_all(source)
    assert source.info.num_examples == 10_000
    assert x.shape == (10_000, 16, 16, 3)
    assert x.min() >= 0.0
    assert x.max() <= 1.0
    assert np.bincount(y, minlength=10).min() > 850


def test_a_linear_model_learns_the_classes():
    """Least squares on 600 examples classifies the validation split."""
    x, y = fetch_all(build("8x8x1:4:600"))
    test_x, test_y = fetch_all(build("8x8x1:4:600", "validation"))
    weights, *_ = np.linalg.lstsq(x.reshape(600, -1) - 0.5, np.eye(4)[y], rcond=None)
    accuracy = (np.argmax((test_x.reshape(60, -1) - 0.5) @ weights, axis=1) == test_y).mean()
    assert accuracy > 0.9


def test_tokens_are_progressions():
    source = build("tokens:11:100", sequence_length=12)
    x, y = fetch_all(source)
    assert source.info.num_classes == 11
    assert np.array_equal(x[:, 1:], y[:, :-1])
    strides = np.diff(np.concatenate([x, y[:, -1:]], axis=1), axis=1) % 11
    assert (strides == strides[:, :1]).all()
    assert source.info.decode(x[0]).split() == [str(token) for token in x[0]]


@pytest.mark.parametrize("spec", ["", "32x", "0x3", "8x8:1", "tokens:", "8x8:4:0", "abc"])
def test_invalid_specs_are_refused(spec):
    with pytest.raises(ConfigError, match=r"is not synthetic:SHAPE"):
        build(spec)

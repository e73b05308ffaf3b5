"""Augmentation layers: their effect on images, compiled by XLA, in training only."""

from __future__ import annotations

from tfpar.config import ConfigError
from tfpar.inputs import augment, from_arrays

import keras
import numpy as np
import pytest
import tensorflow as tf

ALL = "shift:1,crop:3,flip,cutout:4,brightness:0.1,contrast:0.2"


def images(count: int = 64, height: int = 8, width: int = 6, channels: int = 2) -> np.ndarray:
    """Images whose pixels are all different and positive."""
    size = count * height * width * channels
    return (np.random.default_rng(0).permutation(size) + 1.0).reshape(count, height, width, channels).astype(np.float32)


def augmented(text: str, x: np.ndarray, seed: int = 0) -> np.ndarray:
    layers = augment.build(text, seed)
    return tf.function(lambda batch: layers(batch, training=True), jit_compile=True, autograph=False)(x).numpy()


def windows(padded: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    rows, columns = padded.shape[0] - height + 1, padded.shape[1] - width + 1
    return [padded[r : r + height, c : c + width] for r in range(rows) for c in range(columns)]


@pytest.mark.parametrize(("text", "pixels", "mode"), [("shift:2", 2, "constant"), ("crop:3", 3, "reflect")])
def test_shift_and_crop_take_a_window_of_the_padded_image(text, pixels, mode):
    x = images(200)
    places = []
    for image, result in zip(x, augmented(text, x), strict=True):
        padded = np.pad(image, [(pixels, pixels), (pixels, pixels), (0, 0)], mode=mode)
        matches = [number for number, window in enumerate(windows(padded, 8, 6)) if np.array_equal(window, result)]
        assert len(matches) == 1
        places += matches
    # All (2 * pixels + 1)^2 positions occur about equally often.
    counts = np.bincount(places, minlength=(2 * pixels + 1) ** 2)
    assert (counts > 0).mean() > 0.9
    assert counts.max() < 25


def test_flip_mirrors_about_half_of_the_images():
    x = images(400)
    result = augmented("flip", x)
    flipped = (result == x[:, :, ::-1]).all(axis=(1, 2, 3))
    kept = (result == x).all(axis=(1, 2, 3))
    assert (flipped ^ kept).all()
    assert 150 < flipped.sum() < 250


def test_cutout_hides_one_square_per_image():
    x = images(300)
    hidden = augmented("cutout:3", x) == 0
    assert np.array_equal(hidden[..., 0], hidden[..., 1])
    centres = set()
    for mask in hidden[..., 0]:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        # A full rectangle of at most 3 x 3, less where it crosses the border.
        assert 2 <= len(rows) <= 3
        assert 2 <= len(columns) <= 3
        assert mask.sum() == len(rows) * len(columns)
        assert (np.diff(rows) == 1).all()
        centres.add((rows[0], columns[0], len(rows), len(columns)))
    assert len(centres) > 40
    assert np.array_equal(augmented("cutout:3", x)[~hidden], x[~hidden])


def test_brightness_and_contrast_stay_in_their_range():
    x = images(200) / 1e5
    change = augmented("brightness:0.3", x) - x
    per_image = change.mean(axis=(1, 2, 3))
    assert np.abs(change - per_image[:, None, None, None]).max() < 1e-5
    assert -0.3 <= per_image.min() < -0.25
    assert 0.25 < per_image.max() <= 0.3
    ratio = augmented("contrast:0.5", x).std(axis=(1, 2, 3)) / x.std(axis=(1, 2, 3))
    assert 0.499 <= ratio.min() < 0.55
    assert 1.45 < ratio.max() <= 1.501


def test_layers_act_in_training_only():
    x = images()
    layers = augment.build(ALL, 0)
    assert np.array_equal(layers(x), x)
    assert np.array_equal(layers(x, training=False), x)
    assert not np.array_equal(layers(x, training=True), x)


def test_draws_depend_on_the_seed_state_alone():
    """With a substituted state, as in the training step, a call is a pure function of the state."""
    layers = augment.build(ALL, 5)
    layers.build((None, 8, 6, 2))
    x = tf.constant(images())
    assert layers.trainable_variables == []
    state = [tf.constant(variable.numpy()) for variable in layers.non_trainable_variables]
    assert len(state) == 6

    @tf.function(jit_compile=True, autograph=False)
    def apply(state, x):
        return layers.stateless_call([], state, x, training=True)

    first, after = apply(state, x)
    again, _ = apply(state, x)
    later, _ = apply(after, x)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, later)


def test_seeds_and_layers_draw_different_numbers():
    x = images()
    assert not np.array_equal(augmented("shift:2", x, seed=0), augmented("shift:2", x, seed=1))
    first, second = augment.build("shift:2,shift:2", 0).layers
    assert not np.array_equal(first(x, training=True), second(x, training=True))


def test_a_model_with_augmentation_can_be_saved(tmp_path):
    model = keras.Sequential([keras.Input((8, 6, 2)), augment.build(ALL, 7), keras.layers.Flatten()])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = images()
    assert np.array_equal(model(x, training=False), loaded(x, training=False))
    amounts = [(type(layer).__name__, layer.amount, layer.seed) for layer in model.layers[0].layers]
    assert amounts == [(type(layer).__name__, layer.amount, layer.seed) for layer in loaded.layers[0].layers]
    assert not np.array_equal(loaded(x, training=True), loaded(x, training=False))


def test_pixels_stay_float32_under_half_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert augment.build(ALL, 0)(images(), training=True).dtype == tf.float32


@pytest.mark.parametrize("text", ["", "none", " "])
def test_no_augmentation_builds_no_model(text):
    assert augment.build(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flop", r"--augment='flop' is not known. Did you mean 'flip'"),
        ("crop", r"crop needs a positive whole number of pixels, not ''. Write e.g. crop:2"),
        ("shift:0", "shift needs a positive whole number"),
        ("shift:1.5", "shift needs a positive whole number"),
        ("flip:1", "flip takes no amount"),
        ("contrast:1.5", "contrast needs a number above 0 and at most 1"),
        ("brightness:nan", "brightness needs a number"),
    ],
)
def test_invalid_augmentations_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        augment.build(text)


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("crop:6", (8, 6, 2), r"--augment=crop:6 mirrors more pixels than an image of 8x6 has. Use at most crop:5"),
        ("shift:1,flip", (30,), r"--augment=shift changes images .* have shape \(30,\). Leave out --augment"),
    ],
)
def test_unsuitable_examples_are_refused(text, shape, message):
    with pytest.raises(ConfigError, match=message):
        augment.check_augmentation(text, shape)
    with pytest.raises(ConfigError, match=message):
        augment.build(text).build((None, *shape))
    augment.check_augmentation("none", shape)


@pytest.mark.parametrize(("text", "scale", "said"), [("brightness:0.2", 1.0, 1), (ALL, 1 / 255, 0), ("flip", 1.0, 0)])
def test_brightness_that_changes_nothing_is_warned_of(messages, text, scale, said):
    source = from_arrays(np.full((9, 8, 8, 1), 200, np.uint8), np.zeros(9, int), scale=scale)
    augment.check_augmentation(text, source.info.input_spec, source)
    line = "WARNING: --augment=brightness:0.2 adds at most 0.2 to values of up to 200"
    assert sum(each.startswith(line) for each in messages) == said

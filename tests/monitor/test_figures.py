"""Pictures: images with captions, confusion matrices, and what a run of training shows of them."""

from __future__ import annotations

import tfpar
from tests.monitor.test_monitor import _events
from tfpar import inputs
from tfpar.monitor import figures, samples

import keras
import numpy as np
import pytest
import tensorflow as tf


def reddish(pixels: np.ndarray) -> int:
    return int(((pixels[..., 0] > 150) & (pixels[..., 1] < 100) & (pixels[..., 2] < 100)).sum())


@pytest.mark.parametrize("shape", [(8, 8, 1), (300, 500, 3), (32, 16, 4)])
def test_images_have_captions_and_wrong_ones_are_red(shape):
    images = np.full([6, *shape], 0.5, np.float32)
    right = figures.sheet(images, ["cat"] * 6, [False] * 6)
    wrong = figures.sheet(images, ["cat"] * 6, [True] + [False] * 5)
    assert right.shape == wrong.shape
    assert right.dtype == np.uint8
    assert right.shape[2] < 1200
    half = right[0, : right.shape[1] // 2]
    assert (half.sum(axis=-1) < 100).any()  # black letters
    assert reddish(right) == 0
    assert reddish(wrong) > 0
    assert reddish(wrong[0, :, wrong.shape[2] // 4 :]) == 0  # below the first image alone


def test_small_images_are_enlarged_pixel_by_pixel():
    image = np.zeros([1, 2, 2, 1], np.uint8)
    image[0, 0, 0, 0] = 255
    picture = figures.sheet(image, [""])[0]
    white = picture[4 : 4 + 96, 4 : 4 + 96].min(axis=-1) == 255
    assert white[:48, :48].all()
    assert not white[48:].any()


def test_a_confusion_matrix_is_blue_on_its_diagonal_and_red_beside_it():
    counts = np.diag([50.0, 40.0, 30.0])
    perfect = figures.confusion_matrix(counts, ["cat", "a dog with a very long name indeed", "2"])[0].astype(int)
    assert reddish(perfect) == 0
    counts[0, 2] = 50.0
    mistaken = figures.confusion_matrix(counts, ["cat", "dog", "2"])[0].astype(int)
    changed = np.argwhere(mistaken[..., 0] > mistaken[..., 2] + 60)
    (top, left), (bottom, right) = changed.min(axis=0), changed.max(axis=0)
    assert 110 <= top <= bottom < 110 + 40  # the first row
    assert 110 + 80 <= left <= right < 110 + 120  # the third column


@pytest.mark.parametrize(("share", "text"), [(1.0, "100"), (0.999, "99"), (0.056, "6"), (0.005, "1"), (0.001, "<1")])
def test_shares_are_whole_percents(share, text):
    assert figures.percent_text(share) == text


def stripes(count: int) -> inputs.Source:
    """Images whose class is the row that is bright; the last class is never learnt, as its labels are the first's."""
    labels = (np.arange(count) % 3).astype(np.int32)
    x = np.zeros([count, 6, 6, 1], np.float32)
    for row, label in enumerate(labels):
        x[row, 2 * min(label, 1)] = 1.0
    return inputs.from_arrays(x, labels, num_classes=3, name="stripes")


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluation_counts_which_class_is_taken_for_which(replicas):
    trainer = tfpar.Trainer(
        lambda: keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy="one_device" if replicas == 1 else "mirrored",
        devices=replicas,
        global_batch_size=10,
        uneven_batches=True,
    )
    data = stripes(53)
    trainer.evaluate(data)
    predicted = np.argmax(trainer.predict(data), axis=-1)
    expected = np.zeros([3, 3])
    np.add.at(expected, (np.arange(53) % 3, predicted), 1.0)
    np.testing.assert_array_equal(trainer._evaluator.confusion, expected)
    # Another source with other classes: not the counts of this one.
    x = np.zeros([20, 6, 6, 1], np.float32)
    trainer.evaluate(inputs.from_arrays(x, np.zeros(20, np.int32), num_classes=100, name="many"))
    assert trainer._evaluator.confusion is None


def test_a_run_shows_labels_predictions_and_confusion(tmp_path):
    trainer = tfpar.Trainer(
        lambda: keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy="one_device",
        global_batch_size=10,
        learning_rate=0.5,
        histogram_every=3,
        workdir=str(tmp_path),
    )
    trainer.fit(stripes(60), steps=6, validation=stripes(30))
    train, evaluated = _events(tmp_path, "train"), _events(tmp_path, "eval")
    (shown,) = train.Tensors("training/inputs")
    assert len(tf.make_ndarray(shown.tensor_proto)) == 3  # height, width and one picture
    for tag in ("validation/predictions", "validation/confusion_matrix"):
        event = evaluated.Tensors(tag)[-1]
        assert event.step == 6
        picture = tf.io.decode_png(tf.make_ndarray(event.tensor_proto)[2]).numpy()
        # A third of the examples looks like another class: there must be mistakes.
        assert (picture[..., 0].astype(int) > picture[..., 2].astype(int) + 60).any(), tag
    assert [event.step for event in train.Tensors("weights/sequential/dense/kernel")] == [3, 6]
    assert [event.step for event in train.Tensors("weight_updates/sequential/dense/kernel")] == [3, 6]


def test_labels_are_names_where_classes_have_them():
    info = inputs.from_arrays(np.zeros([2, 4, 4, 3], np.float32), np.zeros(2, np.int32), num_classes=2, name="x").info
    assert samples.class_name(info, 1) == "1"
    assert not samples.shows_predictions(inputs.from_arrays(np.zeros([2, 4]), np.zeros(2, np.int32), num_classes=2))

"""Class folders of real image files."""

from __future__ import annotations

import os

from tests import permissions
from tests.inputs.helpers import fetch_all
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source, locate_bad_example
from tfpar.inputs.sources import images

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
SUFFIXES = ["png", "jpg", "bmp", "gif", "JPEG", "webp", "WebP"]


def paint(folder, count: int, first: int = 0) -> None:
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            size = (9 + number, 14)
            Image.new("RGB", size, colour).save(folder / name / f"{number}.{SUFFIXES[number % len(SUFFIXES)]}")


@pytest.fixture
def folder(tmp_path):
    paint(tmp_path, 10)
    (tmp_path / "red" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def build(folder, split="train", **options):
    return build_source(InputConfig(dataset=f"images:{folder}", **{"image_size": 6, **options}), split)


@pytest.mark.parametrize("cache", ["auto", "none"])
def test_images_are_decoded_and_labelled(folder, cache):
    source = build(folder, cache=cache)
    x, y = fetch_all(source)
    assert source.info.class_names == ("blue", "green", "red")
    assert x.shape == (27, 6, 6, 3)
    assert x.dtype == np.float32
    expected = np.array([COLOURS[source.info.class_names[label]] for label in y], np.float32) / 255
    assert np.abs(x - expected[:, None, None, :]).max() < 0.02
    assert source.portable
    none = source.read(tf.zeros([0], tf.int64))  # of a batch in which another source has all examples
    assert [tuple(each.shape) for each in none] == [(0, 6, 6, 3), (0,)]


def test_held_out_files_are_a_share_of_each_class(folder):
    train, validation = (build(folder, split, validation_fraction=0.2) for split in ("train", "validation"))
    assert np.bincount(fetch_all(validation)[1]).tolist() == [2, 2, 2]
    assert np.bincount(fetch_all(train)[1]).tolist() == [8, 8, 8]
    assert set(train.info.files).isdisjoint(validation.info.files)
    assert build(folder, "validation", validation_fraction=0.2).info.files == validation.info.files


def test_names_that_are_no_text_are_read(folder):
    """Of files from systems with another encoding than UTF-8."""
    before = build(folder, validation_fraction=0.0).info.num_examples
    os.rename(folder / "blue" / "0.png", folder / "blue" / os.fsdecode(b"gr\xf6sse.png"))
    source = build(folder, validation_fraction=0.0)
    x, _ = source.fetch(tf.range(source.info.num_examples, dtype=tf.int64))
    assert len(x) == before
    assert build(folder, validation_fraction=0.25).info.num_examples < before


@pytest.mark.parametrize(("folder", "name"), [("train", "validation"), ("train", "val"), ("Train", "Test")])
def test_separate_folders_are_used(tmp_path, folder, name):
    paint(tmp_path / folder, 4)
    paint(tmp_path / name, 2, first=4)
    train, validation = build(tmp_path), build(tmp_path, "validation")
    assert (train.info.num_examples, validation.info.num_examples) == (12, 6)
    assert all(f"/{name}/" in path for path in validation.info.files)


def test_a_training_folder_alone_is_divided(tmp_path):
    paint(tmp_path / "train", 4)
    train, validation = (build(tmp_path, split, validation_fraction=0.25) for split in ("train", "validation"))
    assert train.info.class_names == validation.info.class_names == ("blue", "green", "red")
    assert (train.info.num_examples, validation.info.num_examples) == (9, 3)


def test_a_training_folder_beside_one_of_another_name_is_no_class(tmp_path):
    paint(tmp_path / "train", 1)
    paint(tmp_path / "dev", 1)
    with pytest.raises(ConfigError, match=r"no folder beside it is called validation, valid, val or test\. Give"):
        build(tmp_path)


def test_a_class_may_be_called_train(folder):
    (folder / "green").rename(folder / "train")
    assert build(folder).info.class_names == ("blue", "red", "train")


def test_images_are_cropped_to_their_central_square(tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 4:12] = 200
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "x.png")
    x, _ = fetch_all(build(tmp_path, image_size=4))
    assert np.allclose(x, 200 / 255)


def test_file_shards_read_each_example_once(folder):
    options = InputConfig(dataset=f"images:{folder}", image_size=6, global_batch_size=4, shard_by="file", cache="none")
    pipeline = Pipeline(build_source(options, "train"), options, replicas=2, workers=2)
    weights = [
        weight.sum()
        for worker in range(2)
        for _, _, weight in pipeline.dataset(worker).take(pipeline.steps_per_epoch).as_numpy_iterator()
    ]
    assert sum(weights) == 27


def test_a_directory_that_may_not_be_read_is_not_called_missing(tmp_path):
    folder = tmp_path / "private" / "images"
    folder.mkdir(parents=True)
    for closed, mode in ((folder.parent, 0), (folder, 0), (folder, 0o311), (folder, 0o644)):
        with permissions.of(closed, mode), pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\)"):
            build(folder)


def test_a_class_that_may_not_be_read_is_not_left_out(folder):
    said = rf"--dataset=images:{folder}: '{folder}/red' cannot be read \(Permission denied\)"
    for split in ("train", "validation"):
        with permissions.of(folder / "red", 0), pytest.raises(ConfigError, match=said):
            build(folder, split)


def test_unsuitable_directories_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        build(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no images in class folders.*folders in DIR: empty"):
        build(tmp_path)
    paint(tmp_path / "train", 1)
    paint(tmp_path / "val", 1)
    (tmp_path / "val" / "yellow").mkdir()
    with pytest.raises(ConfigError, match=r"'val' has classes that 'train' lacks: yellow"):
        build(tmp_path, "validation")


def pattern(height: int = 9, width: int = 14) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def save_frames(path, pixels: np.ndarray) -> None:
    frames = [Image.fromarray(pixels), Image.fromarray(255 - pixels)]
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)


def test_webp_files_of_every_form_are_read(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    pixels = pattern()
    with_alpha = np.dstack([pixels, np.full(pixels.shape[:2], 128, np.uint8)])
    Image.fromarray(pixels).save(folder / "0.webp", lossless=True)
    Image.fromarray(with_alpha).save(folder / "1.webp", lossless=True)
    save_frames(folder / "2.webp", with_alpha)
    Image.fromarray(pixels).save(folder / "3.png")
    Image.fromarray(np.full((9, 14, 3), 100, np.uint8)).save(folder / "4.webp", quality=95)
    x, _ = fetch_all(build(tmp_path, resize="9x14", validation_fraction=0.0))
    np.testing.assert_allclose(x[:4], np.repeat(pixels[None] / 255, 4, 0), atol=1e-6)
    np.testing.assert_allclose(x[4], 100 / 255, atol=0.01)


def test_webp_files_that_cannot_be_decoded_are_named(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    Image.fromarray(pattern()).save(folder / "0.webp", lossless=True)
    save_frames(folder / "1.webp", pattern())
    (folder / "2.webp").write_bytes((folder / "0.webp").read_bytes()[:60])
    (folder / "3.webp").write_bytes(b"RIFF")
    (folder / "4.webp").write_bytes(b"RIFF1234WEBP")
    source = build(tmp_path, validation_fraction=0.0, cache="none")
    found = locate_bad_example(source, range(5), limit=5)
    assert [bad.index for bad in found] == [1, 2, 3, 4]
    assert "an animated WebP without transparency" in found[0].reason


def test_images_of_kinds_that_are_not_read_are_named(tmp_path, caplog):
    paint(tmp_path, 2)
    for name in ("red/1.tiff", "red/2.TIFF", "blue/3.heic", "blue/notes.txt", "blue/.hidden.tiff"):
        (tmp_path / name).write_bytes(b"")
    build(tmp_path)
    build(tmp_path, "validation")
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [message for message in messages if "left out" in message]
    assert "not read: 1 .heic, 2 .tiff. Convert them to one of .jpg," in message


def test_hidden_folders_are_left_out(folder):
    hidden = folder / "red" / ".ipynb_checkpoints"
    hidden.mkdir()
    (hidden / "0-checkpoint.png").write_bytes((folder / "red" / "0.png").read_bytes())
    files = [*build(folder).info.files, *build(folder, "validation").info.files]
    assert len(files) == 30
    assert not any("ipynb" in file for file in files)


@pytest.mark.parametrize("cache", ["auto", "none"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"resize": "4x8", "crop": "central"}, lambda pixels: pixels),
        ({"resize": "4x4", "crop": "central"}, lambda pixels: pixels[:, 4:12]),
        ({"resize": "8x4"}, lambda pixels: pixels[:, 6:10]),
        ({"resize": "4x4", "crop": "none"}, lambda pixels: pixels),
    ],
)
def test_resize_and_crop(cache, options, expected, tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:] = 10 * np.arange(16)[:, None]
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "x.png")
    source = build(tmp_path, cache=cache, validation_fraction=0.0, **options)
    height, width = map(int, options["resize"].split("x"))
    assert source.info.input_spec.shape == (height, width, 3)
    wanted = tf.round(tf.image.resize(expected(pixels), [height, width], antialias=True)) / 255
    x, _ = source.fetch(tf.range(1, dtype=tf.int64))
    np.testing.assert_allclose(x[0], wanted, atol=1e-6)


@pytest.mark.parametrize("crop", ["central", "pad", "none"])
def test_images_of_the_size_itself_stay_as_they_are(crop, tmp_path):
    """They are not resized, and a resize would have left them as they are."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)
    (tmp_path / "one").mkdir()
    Image.fromarray(pixels).save(tmp_path / "one" / "0.png")
    x, _ = build(tmp_path, resize="12x10", crop=crop, validation_fraction=0.0).fetch(tf.range(1, dtype=tf.int64))
    np.testing.assert_array_equal(np.rint(np.asarray(x[0]) * 255), pixels)
    np.testing.assert_array_equal(images._resized(tf.constant(pixels), 12, 10, crop), pixels)


def test_pad_keeps_the_whole_image_on_black(tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((4, 8, 3), 255, np.uint8)).save(tmp_path / "a" / "x.png")
    source = build(tmp_path, resize="8x8", crop="pad", validation_fraction=0.0)
    x = source.fetch(tf.range(1, dtype=tf.int64))[0].numpy()
    assert (x[0, 2:6] == 1).all()
    assert (x[0, :2] == 0).all()
    assert (x[0, 6:] == 0).all()


@pytest.mark.parametrize("resize", ["32", "0x4", "ax4", "4x", "4X4", "-4x4", "4x4x3"])
def test_sizes_that_are_none_are_refused(resize):
    with pytest.raises(ConfigError, match=f"--resize='{resize}' must be HxW in pixels"):
        InputConfig(resize=resize)

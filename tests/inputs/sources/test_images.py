"""Class folders of real image files."""

from __future__ import annotations

from tests.inputs.helpers import fetch_all
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source

import numpy as np
import pytest
from PIL import Image

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
SUFFIXES = ["png", "jpg", "bmp", "gif", "JPEG"]


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


def test_held_out_files_are_a_share_of_each_class(folder):
    train, validation = (build(folder, split, validation_fraction=0.2) for split in ("train", "validation"))
    assert np.bincount(fetch_all(validation)[1]).tolist() == [2, 2, 2]
    assert np.bincount(fetch_all(train)[1]).tolist() == [8, 8, 8]
    assert set(train.info.files).isdisjoint(validation.info.files)
    assert build(folder, "validation", validation_fraction=0.2).info.files == validation.info.files


@pytest.mark.parametrize("name", ["validation", "val", "test"])
def test_separate_folders_are_used(tmp_path, name):
    paint(tmp_path / "train", 4)
    paint(tmp_path / name, 2, first=4)
    train, validation = build(tmp_path), build(tmp_path, "validation")
    assert (train.info.num_examples, validation.info.num_examples) == (12, 6)
    assert all(f"/{name}/" in path for path in validation.info.files)


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

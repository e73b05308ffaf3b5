"""Sources are built before the strategy, which must not initialise TensorFlow: no strategy could start afterwards."""

from __future__ import annotations

import sys

from tests import nursery
from tests.inputs import helpers
from tfpar.config import InputConfig
from tfpar.inputs import write

import pytest
from PIL import Image

PROGRAM = """
import sys
import numpy as np
import tfpar
from tensorflow.python.eager import context

dataset, options = sys.argv[1], dict(option.split("=") for option in sys.argv[2:])
for split in ("train", "validation"):
    if dataset == "arrays":
        source = tfpar.inputs.from_arrays(np.ones([9, 2]), np.arange(9) % 3, split=split)
    else:
        source = tfpar.inputs.load(dataset, split, **options)
    tfpar.task_spec(source)
    tfpar.inputs.Pipeline(source, tfpar.ExperimentConfig().input, training=False).report()
assert source.info.num_examples
assert context.context()._context_handle is None, "TensorFlow was initialised"
source.load()
source.fetch(np.array([0]))
"""


def build(dataset: str, *options: str) -> None:
    result = nursery.run(
        [sys.executable, "-c", PROGRAM, dataset, *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "deprecated" not in result.stderr


@pytest.mark.parametrize("dataset", ["arrays", "text", "synthetic:8x8x1", "synthetic:tokens"])
def test_building_generated_sources_does_not_initialise_tensorflow(dataset):
    build(dataset)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_writing_digits_does_not_initialise_tensorflow(tmp_path, cache):
    build("digits", f"data_dir={tmp_path}", f"cache={cache}")


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_building_from_shards_does_not_initialise_tensorflow(tmp_path, cache):
    write.write(InputConfig(dataset="synthetic:4:2:40"), str(tmp_path / "out"), shards=2)
    build(f"tfrecord:{tmp_path}/out", f"cache={cache}")


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_building_from_images_does_not_initialise_tensorflow(tmp_path, cache):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("RGB", (5, 5)).save(tmp_path / name / f"{number}.png")
    build(f"images:{tmp_path}", f"cache={cache}")


def test_building_from_tfds_texts_does_not_initialise_tensorflow(tmp_path):
    helpers.prepare(helpers.TinyTexts, tmp_path)
    build("tfds:tiny_texts:train,validation", f"data_dir={tmp_path}")

"""Files of digits, and the places where they are and where they arrive."""

from __future__ import annotations

import pathlib
import shutil

from tests.incremental.watched import EXAMPLES, FILES, shard
from tfpar.config import InputConfig
from tfpar.inputs.write import write

import pytest
import tensorflow as tf


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> pathlib.Path:
    """Digits in eight files, and their validation examples."""
    folder = tmp_path_factory.mktemp("digits") / "shards"
    write(InputConfig(dataset="digits"), str(folder), 1)
    whole = next(folder.glob("train*"))
    records = iter(tf.data.TFRecordDataset(str(whole)).as_numpy_iterator())
    for number in range(FILES):
        with tf.io.TFRecordWriter(str(shard(folder, number))) as writer:
            for _ in range(EXAMPLES):
                writer.write(next(records))
    whole.unlink()
    return folder


@pytest.fixture
def places(tmp_path, shards) -> tuple[pathlib.Path, pathlib.Path]:
    """A data set of the first file, and an empty directory to watch."""
    base, incoming = tmp_path / "base", tmp_path / "incoming"
    base.mkdir()
    incoming.mkdir()
    for file in (*shards.glob("validation*"), shards / "features.json", shard(shards, 0)):
        shutil.copy(file, base)
    return base, incoming

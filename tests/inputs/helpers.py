"""Sources and objects whose examples say which they are, and small real data sets on disk."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tfpar.inputs.source import CLASSIFICATION, Source, SourceInfo

import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

CLASSES = 7


def index_source(count: int, records_per_file: Sequence[int] = (), *, storage: str = "generated") -> Source:
    """Example i is x = [i, 2i] float32 and y = i mod 7."""

    def read(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.stack([indices, 2 * indices], axis=-1), indices % CLASSES

    info = SourceInfo(
        name="index",
        task=CLASSIFICATION,
        split="train",
        num_examples=count,
        input_spec=tf.TensorSpec([2], tf.float32),
        label_spec=tf.TensorSpec([], tf.int32),
        num_classes=CLASSES,
        files=tuple(f"file{number}" for number in range(len(records_per_file))),
        records_per_file=tuple(records_per_file),
        storage=storage,
    )
    return Source(info=info, read=read)


def fetch_all(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """All examples of a source in order, read through a traced graph in three uneven batches."""
    fetch = tf.function(source.fetch, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    count = source.info.num_examples
    parts = [fetch(tf.constant(part, tf.int64)) for part in np.array_split(np.arange(count), 3)]
    return np.concatenate([x.numpy() for x, _ in parts]), np.concatenate([y.numpy() for _, y in parts])


class MapStyle:
    """By the protocol of PyTorch's map-style data sets; counts what is read."""

    def __init__(self, count: int = 40, seconds: float = 0.0):
        self.count = count
        self.seconds = seconds
        self.reads: collections.Counter = collections.Counter()
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple:
        with self._lock:
            self.reads[index] += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        with self._lock:
            self.at_once -= 1
        return np.full((3, 2), index, np.float64), index % 5


class Batches(keras.utils.PyDataset):
    """Batches of 6 of 20 examples; the last has 2."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple:
        self.reads.append(index)
        numbers = np.arange(20)[6 * index : 6 * (index + 1)]
        return {"n": numbers.astype(np.float32)}, numbers % 4, numbers / 2.0


class TinyShapes(tfds.core.GeneratorBasedBuilder):
    """6x5 colour images of random pixels, three classes, with a validation split."""

    VERSION = tfds.core.Version("1.2.0")
    code_path = None  # see tfpar.inputs.sources.digits
    IMAGES = np.random.default_rng(0).integers(0, 256, (29, 6, 5, 3), np.uint8)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(6, 5, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=["ash", "birch", "cedar"]),
            "unused": tfds.features.Text(),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(range(20)), "validation": self._generate_examples(range(20, 29))}

    def _generate_examples(self, numbers: range) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in numbers:
            yield number, {"image": self.IMAGES[number], "label": number % 3, "unused": "x"}


class TinyPhotos(TinyShapes):
    """Images of different sizes, one split only."""

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(num_classes=3)}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(range(20))}

    def _generate_examples(self, numbers: range) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in numbers:
            image = np.full((8 + number, 12, 3), 10 * number, np.uint8)
            yield number, {"image": image, "label": number % 3}


class TinyTexts(TinyShapes):
    """Short texts."""

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict({"text": tfds.features.Text()}))

    def _generate_examples(self, numbers: range) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in numbers:
            yield number, {"text": f"text number {number}, " * 5}


class TinyRegression(TinyShapes):
    """A label that is no class."""

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "features": tfds.features.Tensor(shape=(2,), dtype=np.float32),
            "target": tfds.features.Scalar(np.float32),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), supervised_keys=("features", "target")
        )

    def _generate_examples(self, numbers: range) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in numbers:
            yield number, {"features": np.ones(2, np.float32), "target": np.float32(number)}


def prepare(builder: type[tfds.core.GeneratorBasedBuilder], data_dir: Any, file_format: str = "tfrecord") -> Any:
    """Writes one of the data sets above to disk with TFDS, in 3 shards a split."""
    tfds.disable_progress_bar()
    made = builder(data_dir=str(data_dir), file_format=file_format)
    made.download_and_prepare(
        download_dir=str(data_dir / "downloads"),
        download_config=tfds.download.DownloadConfig(try_download_gcs=False, num_shards=3),
    )
    return made

"""The handwritten digits of scikit-learn, as a TensorFlow Datasets data set on disk.

1,797 real images of 8x8 pixels with 17 grey levels (Alpaydin and Kaynak 1998). The first use
writes them with TFDS into `--data_dir`; every use reads them back through TFDS, so the data set
behaves in every respect like a downloaded one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs.source import Source
from tfpar.inputs.sources import tfds as tfds_source
from tfpar.process.activity import activity

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import tqdm_utils

# Several shards although one would be enough: with --shard_by=file each worker needs its own file.
SHARDS = 8
_HELD_OUT_EVERY = 5


class SklearnDigits(tfds.core.GeneratorBasedBuilder):
    """Builder of the data set `sklearn_digits`; reads scikit-learn's package data, downloads nothing."""

    VERSION = tfds.core.Version("1.0.0")
    # TFDS 4.9.10 looks for download checksums next to the code and imports importlib_resources for that, which
    # it does not require on Python >= 3.9. There is nothing to download; without a code path TFDS does not look.
    code_path = None
    RELEASE_NOTES = {"1.0.0": "1,437 training and 360 test images."}  # noqa: RUF012 - the attribute TFDS asks for

    # TFDS prints a line before and after a download; there is no download, and only the chief should print.
    def _log_download_bytes(self) -> None:
        pass

    def _log_download_done(self) -> None:
        pass

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Handwritten digits, 8x8 pixels. Grey level g of 0 to 16 is stored as round(g * 255 / 16).",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        images, labels, held_out = load_digits()
        return {
            "train": self._generate_examples(images, labels, np.flatnonzero(~held_out)),
            "test": self._generate_examples(images, labels, np.flatnonzero(held_out)),
        }

    def _generate_examples(
        self, images: np.ndarray, labels: np.ndarray, chosen: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in chosen.tolist():
            yield index, {"image": png(images[index]), "label": int(labels[index])}


def png(image: np.ndarray) -> bytes:
    """Encodes a uint8 image [height, width, 1] as a PNG file.

    TFDS would use a TensorFlow operation, which initialises the runtime (see `tfpar.inputs.source`).
    """
    height, width, _ = image.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits, grey
    rows = b"".join(b"\0" + row.tobytes() for row in image)  # filter 0: none
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the digits of scikit-learn.

    Returns:
      images: uint8 [1797, 8, 8, 1], grey level g of 0 to 16 as round(g * 255 / 16).
      labels: int64 [1797], 0 to 9.
      held_out: bool [1797], the 360 test images: every fifth image in the order of (label, hash
        of the index), so a fifth of each class (to within one image) is held out, and no library
        version changes the choice.

    Raises:
      ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ConfigError(
            "--dataset=digits needs scikit-learn to write the data set the first time: pip install scikit-learn, "
            "or point --data_dir at a directory that contains it."
        ) from error
    digits = datasets.load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = digits.target.astype(np.int64)
    scattered = [hashlib.sha256(str(index).encode()).hexdigest() for index in range(len(labels))]
    order = sorted(range(len(labels)), key=lambda index: (labels[index], scattered[index]))
    held_out = np.zeros(len(labels), bool)
    held_out[order[::_HELD_OUT_EVERY]] = True
    return images, labels, held_out


def prepare(data_dir: str) -> str:
    """Writes the data set unless it exists; any number of processes may call this at once.

    Each process writes into its own temporary directory and renames it into place. Renaming is
    atomic: the first process wins, and the others use its result.

    Args:
      data_dir: The TFDS directory; created if it does not exist.

    Returns:
      The directory of the prepared data set.

    Raises:
      ConfigError: The directory is not writable.
    """
    final = os.path.join(data_dir, SklearnDigits.name, str(SklearnDigits.VERSION))
    if os.path.isdir(final):
        return final
    try:
        os.makedirs(os.path.dirname(final), exist_ok=True)
        staging = tempfile.mkdtemp(prefix=f".{SklearnDigits.name}.", dir=data_dir)
    except OSError as error:
        raise ConfigError(
            f"--dataset=digits cannot write its data set to --data_dir={data_dir!r} ({error}). "
            "Give a writable --data_dir, or set TFDS_DATA_DIR."
        ) from error
    try:
        builder = SklearnDigits(data_dir=staging)
        with _without_progress_bars(), activity("building the data set digits"):
            builder.download_and_prepare(
                download_dir=os.path.join(staging, "downloads"),
                download_config=tfds.download.DownloadConfig(try_download_gcs=False, num_shards=SHARDS),
            )
        try:
            os.rename(builder.data_dir, final)
        except OSError:
            if not os.path.isdir(final):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    # TFDS has functions to switch progress bars off and on, but none that returns the current state.
    active = getattr(tqdm_utils, "_active", False)
    tfds.disable_progress_bar()
    try:
        yield
    finally:
        if active:
            tfds.enable_progress_bar()


def build(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=digits`: float32 [8, 8, 1] in [0, 1], 1,437 for training and 360 held out.

    Args:
      argument: The text after the colon in `--dataset`; must be empty.
      config: The input options; uses `data_dir` and `cache`.
      split: `"train"` or `"validation"`.
      seed: Not used; the split is fixed.

    Raises:
      ConfigError: `argument` is not empty, or the data set does not exist and cannot be written.
    """
    if argument:
        raise ConfigError(f"--dataset='digits:{argument}': digits takes no argument. Write --dataset=digits.")
    builder = tfds.builder_from_directory(prepare(tfds_source.data_dir(config)))
    part = "train" if split == "train" else "test"
    return tfds_source.from_builder("digits", builder, part, config, split)

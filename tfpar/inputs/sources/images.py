"""`images:DIR`: a folder of images per class.

The graph decodes files, crops them to their central square and resizes them, many at a time.
"""

from __future__ import annotations

import os

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import memory, source
from tfpar.inputs.source import Source, SourceInfo

import numpy as np
import tensorflow as tf

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_VALIDATION_FOLDERS = ("validation", "valid", "val", "test")


def build(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=images:DIR`: float32 [image_size, image_size, 3] in [0, 1].

    `DIR/CLASS/.../IMAGE`, or `DIR/train/CLASS/...` with `DIR/validation/CLASS/...` (also `valid`,
    `val`, `test`). In the first layout, `--validation_fraction` of each class is held out: the
    files whose relative paths hash lowest. Labels follow the alphabetical order of the class names.
    Only the first frame of an animated GIF is read.

    Args:
      argument: The directory.
      config: The input options; uses `image_size`, `validation_fraction`, `cache` and `on_bad_record`.
      split: `"train"` or `"validation"`.
      seed: Not used; the split does not depend on it.

    Raises:
      ConfigError: The directory is missing, has no class folders, or holds no images; or the
        validation folder has a class that the training folder lacks.
    """
    name = f"images:{argument}"
    root = os.path.expanduser(argument)
    if not argument or not os.path.isdir(root):
        raise ConfigError(f"--dataset={name}: no such directory. Give a directory with a folder of images per class.")
    classes, paths, labels = _list_split(name, root, config.validation_fraction, split == "train")
    size = config.image_size
    listing = source.LazyTensors(lambda: (np.array(paths, object if paths else np.bytes_), np.array(labels, np.int32)))

    def read(indices: tf.Tensor) -> source.Batch:
        files, classes_of = listing.tensors()
        pixels = tf.map_fn(
            lambda path: read_square(path, size),
            tf.gather(files, indices),
            fn_output_signature=tf.TensorSpec([size, size, 3], tf.uint8),
            parallel_iterations=16,
        )
        return pixels, tf.gather(classes_of, indices)

    info = SourceInfo(
        name=name,
        task=source.CLASSIFICATION,
        split=split,
        num_examples=len(paths),
        input_spec=tf.TensorSpec([size, size, 3], tf.float32),
        label_spec=tf.TensorSpec([], tf.int32),
        num_classes=len(classes),
        class_names=tuple(classes),
        files=tuple(paths),
        records_per_file=(1,) * len(paths),
    )
    stored = Source(info=info, read=read, scale=1 / 255, load=listing.tensors, skip=config.on_bad_record == "skip")
    return memory.apply_cache(stored, config.cache, size * size * 3 + tf.int32.size)


def read_square(path: tf.Tensor, size: int) -> tf.Tensor:
    """Decodes an image file (JPEG, PNG, BMP, GIF) to uint8 [size, size, 3]."""
    image = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
    return tf.ensure_shape(square(tf.ensure_shape(image, [None, None, 3]), size), [size, size, 3])


def square(image: tf.Tensor, size: int) -> tf.Tensor:
    """Crops a uint8 image [height, width, channels] to its central square and resizes it to [size, size, channels].

    Bilinear with anti-aliasing, rounded to uint8, so that cached and newly read images are the same.
    """
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    side = tf.minimum(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    middle = image[top : top + side, left : left + side]
    resized = tf.image.resize(middle, [size, size], method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0.0, 255.0), tf.uint8)


def _list_split(name: str, root: str, fraction: float, training: bool) -> tuple[list[str], list[str], list[int]]:
    """Returns the class names, and the paths and labels of the split, ordered by class and path."""
    folders = _folders(root)
    separate = next((folder for folder in _VALIDATION_FOLDERS if folder in folders), None)
    if "train" in folders and separate:
        classes = _folders(os.path.join(root, "train"))
        extra = sorted(set(_folders(os.path.join(root, separate))) - set(classes))
        if extra:
            raise ConfigError(
                f"--dataset={name}: {separate!r} has classes that 'train' lacks: {', '.join(extra)}. "
                "Both need the same class folders."
            )
        base = os.path.join(root, "train" if training else separate)
        chosen = {label: _images(os.path.join(base, label)) for label in classes}
    else:
        classes, base = folders, root
        chosen = {}
        for label in classes:
            files = _images(os.path.join(base, label))
            count = round(len(files) * fraction)
            if fraction > 0:  # every class is evaluated, and trained on
                count = min(max(count, 1), max(len(files) - 1, 0))
            held_out = source.held_out_mask([f"{label}/{file}" for file in files], count)
            chosen[label] = [file for file, held in zip(files, held_out, strict=True) if held != training]
    if not any(chosen.values()) and training:
        raise ConfigError(
            f"--dataset={name}: no images in class folders. Expected DIR/CLASS/IMAGE with suffix "
            f"{', '.join(SUFFIXES)}; folders in DIR: {', '.join(folders) or 'none'}."
        )
    paths = [os.path.join(base, label, file) for label in classes for file in chosen[label]]
    labels = [number for number, label in enumerate(classes) for _ in chosen[label]]
    return classes, paths, labels


def _folders(path: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def _images(root: str) -> list[str]:
    """Returns the relative paths of the image files below a directory, sorted; a missing directory has none."""
    paths = []
    for folder, _, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        paths += [
            file if relative == "." else f"{relative}/{file}".replace(os.sep, "/")
            for file in files
            if file.lower().endswith(SUFFIXES) and not file.startswith(".")
        ]
    return sorted(paths)

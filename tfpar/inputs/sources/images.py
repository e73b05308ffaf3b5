"""`images:DIR`: a folder of images per class.

The graph decodes files, crops them to their central square and resizes them, many at a time.
"""

from __future__ import annotations

import collections
import logging
import mimetypes
import os
from collections.abc import Sequence

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import memory, source
from tfpar.inputs.folders import files_below
from tfpar.inputs.source import Source, SourceInfo
from tfpar.process.writable import read_error

import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
# Suffixes of images that Python's `mimetypes` does not know.
_OTHER_IMAGES = (
    ".avif",
    ".heic",
    ".heif",
    ".jxl",
    ".jp2",
    ".j2k",
    ".dng",
    ".raw",
    ".cr2",
    ".nef",
    ".arw",
    ".exr",
    ".tga",
)
_VALIDATION_FOLDERS = ("validation", "valid", "val", "test")


def build(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=images:DIR`: float32 [height, width, 3] in [0, 1], of the size of `--resize` or `--image_size`.

    `DIR/CLASS/.../IMAGE`, or `DIR/train/CLASS/...` with `DIR/validation/CLASS/...` (also `valid`, `val`, `test`, in any
    case). Without a validation folder, `--validation_fraction` of each class is held out: the files whose relative
    paths hash lowest. Labels follow the alphabetical order of the class names. Beside folders of other names, `train`
    is a class if images are directly in it, and otherwise refused.
    Only the first frame of an animated GIF or WebP is read. Images in other formats are skipped, with a warning.

    Args:
      argument: The directory.
      config: The input options; uses `image_size`, `resize`, `crop`, `validation_fraction`, `cache` and
        `on_bad_record`.
      split: `"train"` or `"validation"`.
      seed: Not used; the split does not depend on it.

    Raises:
      ConfigError: The directory is missing or cannot be read, has no class folders, or holds no images; the
        validation folder has a class that the training folder lacks; or `train` is neither a class nor beside a
        validation folder.
    """
    name = f"images:{argument}"
    root = os.path.expanduser(argument)
    if argument and (error := read_error(root)):
        raise ConfigError(
            f"--dataset={name}: the directory cannot be read ({error.strerror}). Give yourself the permission to list "
            "it and to search it and those above it, or give another directory."
        )
    if not argument or not os.path.isdir(root):
        raise ConfigError(f"--dataset={name}: no such directory. Give a directory with a folder of images per class.")
    if split == "train":
        _warn_of_other_images(name, root)
    return from_files(name, config, split, *_list_split(name, root, config.validation_fraction, split == "train"))


def from_files(
    name: str, config: InputConfig, split: str, classes: Sequence[str], paths: Sequence[str], labels: Sequence[int]
) -> Source:
    """Returns a source of image files, in this order.

    Args:
      name: The data set, for reports and errors.
      config: As for `build`.
      split: `"train"` or `"validation"`.
      classes: Names of all classes, in label order.
      paths: The files.
      labels: Their classes.
    """
    height, width = config.image_shape()
    encoded = [os.fsencode(path) for path in paths]
    listing = source.LazyTensors(
        lambda: (np.array(encoded, object if encoded else np.bytes_), np.array(labels, np.int32))
    )

    def read(indices: tf.Tensor) -> source.Batch:
        files, classes_of = listing.tensors()
        contents = tf.map_fn(tf.io.read_file, tf.gather(files, indices), parallel_iterations=16)
        pixels = tf.map_fn(
            lambda file: fit(_decode(*file), height, width, config.crop),
            (contents, _kinds(contents)),
            fn_output_signature=tf.TensorSpec([height, width, 3], tf.uint8),
            parallel_iterations=16,
        )
        return pixels, tf.gather(classes_of, indices)

    info = SourceInfo(
        name=name,
        task=source.CLASSIFICATION,
        split=split,
        num_examples=len(paths),
        input_spec=tf.TensorSpec([height, width, 3], tf.float32),
        label_spec=tf.TensorSpec([], tf.int32),
        num_classes=len(classes),
        class_names=tuple(classes),
        files=tuple(paths),
        records_per_file=(1,) * len(paths),
    )
    stored = Source(info=info, read=read, scale=1 / 255, load=listing.tensors, skip=config.on_bad_record == "skip")
    return memory.apply_cache(stored, config.cache, height * width * 3 + tf.int32.size)


def _kinds(contents: tf.Tensor) -> tf.Tensor:
    """Returns the kinds of image files [n] as indices of the branches of `_decode`, int32 [n].

    Handles all files at once, because an operation on a short string costs as much as decoding a small image.
    """
    headers = tf.strings.join([tf.strings.substr(contents, 0, 21), bytes(21)])  # pads short files
    # TensorFlow 2.21 leaves the second dimension out where there is no string.
    headers = tf.reshape(tf.io.decode_raw(tf.strings.substr(headers, 0, 21), tf.uint8), [-1, 21])

    def has(position: int, expected: bytes) -> tf.Tensor:
        return tf.reduce_all(headers[:, position : position + len(expected)] == list(expected), axis=1)

    def flag(bit: int) -> tf.Tensor:
        return tf.bitwise.bitwise_and(headers[:, 20], tf.constant(bit, tf.uint8)) > 0

    is_webp = has(0, b"RIFF") & has(8, b"WEBP")
    animated = is_webp & has(12, b"VP8X") & flag(2)
    return tf.where(animated, tf.where(flag(16), 2, 3), tf.where(is_webp, 1, 0))


def _decode(content: tf.Tensor, kind: tf.Tensor) -> tf.Tensor:
    """Decodes an image file (JPEG, PNG, BMP, GIF, WebP), or the first frame of an animation.

    Transparency is left out. TensorFlow 2.21's `decode_webp` must be asked for the channels that a file has: 4 for an
    animation, of which it decodes only those with transparency (it writes out of bounds if asked for 0), and 0 ("as in
    the file") otherwise.

    Args:
      content: string []. The file.
      kind: int32 []. From `_kinds`.

    Returns:
      uint8 [height, width, 3].
    """

    def webp(channels: int) -> tf.Tensor:
        frames = tf.io.decode_webp(content, channels=channels)
        return tf.reshape(frames, tf.concat([[-1], tf.shape(frames)[-3:]], 0))[0, :, :, :3]

    def opaque_animation() -> tf.Tensor:
        message = "it is an animated WebP without transparency, which TensorFlow cannot decode"
        failed = tf.debugging.Assert(False, [message])
        with tf.control_dependencies([failed] if failed is not None else []):
            return tf.zeros([1, 1, 3], tf.uint8)

    image = tf.switch_case(
        kind,
        [
            lambda: tf.io.decode_image(content, channels=3, expand_animations=False),
            lambda: webp(channels=0),
            lambda: webp(channels=4),
            opaque_animation,
        ],
    )
    return tf.ensure_shape(image, [None, None, 3])


def fit(image: tf.Tensor, height: int, width: int, crop: str = "central") -> tf.Tensor:
    """Fits a uint8 image [any, any, channels] into [height, width, channels].

    Bilinear with anti-aliasing, rounded to uint8, so that cached and newly read images are the same.

    Args:
      image: The image.
      height: Height of the result.
      width: Width of the result.
      crop: `"central"` cuts out the largest central part of the same proportions first, `"none"` stretches the image,
        `"pad"` keeps the whole image in its proportions, on black.
    """
    # Resizing to the same size changes nothing, and takes most of the time of a small image.
    fits = tf.reduce_all(tf.equal(tf.shape(image)[:2], [height, width]))
    fitted = tf.cond(fits, lambda: image, lambda: _resized(image, height, width, crop))
    return tf.ensure_shape(fitted, [height, width, image.shape[-1]])


def _resized(image: tf.Tensor, height: int, width: int, crop: str) -> tf.Tensor:
    if crop == "pad":
        resized = tf.image.resize_with_pad(image, height, width, method="bilinear", antialias=True)
    else:
        part = _central_part(image, height, width) if crop == "central" else image
        resized = tf.image.resize(part, [height, width], method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0.0, 255.0), tf.uint8)


def _central_part(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Returns the largest central part of an image with the proportions height : width, rounded to whole pixels."""
    rows, columns = tf.shape(image)[0], tf.shape(image)[1]
    part_rows = tf.clip_by_value((2 * columns * height + width) // (2 * width), 1, rows)
    part_columns = tf.clip_by_value((2 * rows * width + height) // (2 * height), 1, columns)
    top, left = (rows - part_rows) // 2, (columns - part_columns) // 2
    return image[top : top + part_rows, left : left + part_columns]


def _warn_of_other_images(name: str, root: str) -> None:
    """Warns of image files below a directory whose formats are not read."""
    kinds: collections.Counter[str] = collections.Counter()
    for file in files_below(root, f"--dataset={name}"):
        suffix = os.path.splitext(file)[1].lower()
        if "/" in file and suffix and suffix not in SUFFIXES and _is_image(suffix):
            kinds[suffix] += 1
    if kinds:
        listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(kinds.items()))
        _log.warning(
            "--dataset=%s: files left out because their kind of image is not read: %s. Convert them to one of %s.",
            name,
            listed,
            ", ".join(SUFFIXES),
        )


def _is_image(suffix: str) -> bool:
    return suffix in _OTHER_IMAGES or (mimetypes.guess_type(f"a{suffix}")[0] or "").startswith("image/")


def _list_split(name: str, root: str, fraction: float, training: bool) -> tuple[list[str], list[str], list[int]]:
    """Returns the class names, and the paths and labels of the split, ordered by class and path."""
    base, separate = _find_folders(name, root)
    classes = _folders(base)
    if separate:
        extra = sorted(set(_folders(separate)) - set(classes))
        if extra:
            raise ConfigError(
                f"--dataset={name}: {os.path.basename(separate)!r} has classes that {os.path.basename(base)!r} lacks: "
                f"{', '.join(extra)}. Both need the same class folders."
            )
        base = base if training else separate
        chosen = {label: _images(name, os.path.join(base, label)) for label in classes}
    else:
        chosen = {}
        for label in classes:
            files = _images(name, os.path.join(base, label))
            count = round(len(files) * fraction)
            if fraction > 0:  # every class has examples for training and for evaluation
                count = min(max(count, 1), max(len(files) - 1, 0))
            held_out = source.held_out_mask([f"{label}/{file}" for file in files], count)
            chosen[label] = [file for file, held in zip(files, held_out, strict=True) if held != training]
    if not any(chosen.values()) and training:
        raise ConfigError(
            f"--dataset={name}: no images in class folders. Expected DIR/CLASS/IMAGE with suffix "
            f"{', '.join(SUFFIXES)}; folders in DIR: {', '.join(_folders(root)) or 'none'}."
        )
    paths = [os.path.join(base, label, file) for label in classes for file in chosen[label]]
    labels = [number for number, label in enumerate(classes) for _ in chosen[label]]
    return classes, paths, labels


def _find_folders(name: str, root: str) -> tuple[str, str | None]:
    """Returns the folder of the class folders, and that of separate validation examples if there is one."""
    named = {folder.lower(): os.path.join(root, folder) for folder in _folders(root)}
    train = named.get("train")
    if train is None:
        return root, None
    separate = next((named[folder] for folder in _VALIDATION_FOLDERS if folder in named), None)
    if separate:
        return train, separate
    if not _folders(train) or any(entry.name.lower().endswith(SUFFIXES) for entry in os.scandir(train)):
        return root, None  # a class of this name
    if len(named) == 1:
        return train, None
    *others, last = _VALIDATION_FOLDERS
    raise ConfigError(
        f"--dataset={name}: {os.path.basename(train)!r} holds folders instead of images, but no folder beside it is "
        f"called {', '.join(others)} or {last}. Give the folder of validation examples such a name, or hold some out "
        f"(--validation_fraction) of --dataset=images:{train}. If it is a class, put its images directly into it."
    )


def _folders(path: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def _images(name: str, root: str) -> list[str]:
    """Returns the relative paths of the image files below a directory, sorted; a missing directory has none."""
    return [file for file in files_below(root, f"--dataset={name}") if file.lower().endswith(SUFFIXES)]

"""Image augmentation as Keras layers, which run on the device inside the compiled step.

`build("crop:4,flip")` creates one layer per name. The layers act with `training=True` only, draw
from a Keras `SeedGenerator` for each example (so the step can substitute the seed), keep shape and
dtype, and use only pads, gathers and comparisons, which XLA compiles on every device.
(Keras' own geometric layers go through `ImageProjectiveTransform`, which has no XLA kernel.)

| name | effect |
|---|---|
| `shift:N` | moves the image by up to N pixels in each direction, and fills with zeros |
| `crop:N` | the same, but fills with the image mirrored at its borders: pad by N, crop at random |
| `flip` | mirrors left and right with probability 1/2 |
| `cutout:N` | sets a square of N x N pixels at a random position to zero (DeVries and Taylor 2017) |
| `brightness:D` | adds a number from [-D, D], for images whose values lie in [0, 1] or around 0 |
| `contrast:D` | multiplies the distance from the image's mean by a number from [1 - D, 1 + D] |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tfpar.config import ConfigError, unknown_name
from tfpar.inputs import permutation
from tfpar.inputs.source import Source
from tfpar.inputs.structures import Structure

import keras
import tensorflow as tf

_PACKAGE = "tfpar"
_LOOKED_AT, _LARGEST = 8, 16.0  # images, and their largest value that brightness of at most 1 still changes
_log = logging.getLogger(__name__)


class _RandomImageLayer(keras.layers.Layer):
    """Applies `transform` to float images [batch, height, width, channels] in training only."""

    def __init__(self, amount: float, seed: int, **kwargs: Any):
        # Pixels stay float32 under a half-precision policy too: the model casts them once, at its first layer.
        super().__init__(**{"dtype": "float32", **kwargs})
        self.amount = amount
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Refuses examples that are not images, or are too small."""
        _check_shape(type(self).__name__.lower(), self.amount, input_shape[1:])
        super().build(input_shape)

    def call(self, images: tf.Tensor, training: bool = False) -> tf.Tensor:
        """float32 [batch, height, width, channels] -> the same shape."""
        return self.transform(images) if training else images

    def transform(self, images: tf.Tensor) -> tf.Tensor:
        """Applies the random change: float32 [batch, height, width, channels] -> the same shape."""
        raise NotImplementedError

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "amount": self.amount, "seed": self.seed}

    def _uniform(self, images: tf.Tensor, low: float, high: float) -> tf.Tensor:
        """Draws a number from [low, high) for each image, [batch, 1, 1, 1]."""
        return keras.random.uniform((keras.ops.shape(images)[0], 1, 1, 1), low, high, seed=self.seed_generator)

    def _offsets(self, images: tf.Tensor, stop: tuple[int, int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Draws integers from [0, stop[0]) and [0, stop[1]) for each image, int32 [batch] each."""
        uniform = keras.random.uniform((keras.ops.shape(images)[0], 2), seed=self.seed_generator)
        # The product of a float32 below 1 and a small integer may round up to that integer.
        rows, columns = (
            tf.minimum(tf.cast(uniform[:, axis] * stop[axis], tf.int32), stop[axis] - 1) for axis in (0, 1)
        )
        return rows, columns


@keras.saving.register_keras_serializable(_PACKAGE)
class Shift(_RandomImageLayer):
    """Moves each image by up to `amount` whole pixels in each direction, and fills with zeros."""

    padding = "CONSTANT"

    def transform(self, images: tf.Tensor) -> tf.Tensor:
        height, width = images.shape[1:3]
        pixels = int(self.amount)
        border = [pixels, pixels]
        padded = tf.pad(images, [[0, 0], border, border, [0, 0]], self.padding)
        top, left = self._offsets(images, (2 * pixels + 1, 2 * pixels + 1))
        rows = tf.gather(padded, top[:, tf.newaxis] + tf.range(height), axis=1, batch_dims=1)
        return tf.gather(rows, left[:, tf.newaxis] + tf.range(width), axis=2, batch_dims=1)


@keras.saving.register_keras_serializable(_PACKAGE)
class Crop(Shift):
    """Pads each image by `amount` mirrored pixels and crops it to its size at a random position."""

    padding = "REFLECT"


@keras.saving.register_keras_serializable(_PACKAGE)
class Flip(_RandomImageLayer):
    """Mirrors each image left and right with probability 1/2."""

    def transform(self, images: tf.Tensor) -> tf.Tensor:
        return tf.where(self._uniform(images, 0.0, 1.0) < 0.5, tf.reverse(images, [2]), images)


@keras.saving.register_keras_serializable(_PACKAGE)
class Cutout(_RandomImageLayer):
    """Sets a square of `amount` pixels, centred anywhere in the image, to zero."""

    def transform(self, images: tf.Tensor) -> tf.Tensor:
        height, width = images.shape[1:3]
        side = int(self.amount)
        inside = []
        for centre, size in zip(self._offsets(images, (height, width)), (height, width), strict=True):
            distance = tf.range(size) - (centre[:, tf.newaxis] - side // 2)
            inside.append((distance >= 0) & (distance < side))
        hidden = inside[0][:, :, tf.newaxis, tf.newaxis] & inside[1][:, tf.newaxis, :, tf.newaxis]
        return tf.where(hidden, tf.zeros_like(images), images)


@keras.saving.register_keras_serializable(_PACKAGE)
class Brightness(_RandomImageLayer):
    """Adds a number from [-amount, amount] to each image."""

    def transform(self, images: tf.Tensor) -> tf.Tensor:
        return images + self._uniform(images, -self.amount, self.amount)


@keras.saving.register_keras_serializable(_PACKAGE)
class Contrast(_RandomImageLayer):
    """Multiplies each image's distance from its mean by a number from [1 - amount, 1 + amount]."""

    def transform(self, images: tf.Tensor) -> tf.Tensor:
        mean = tf.reduce_mean(images, [1, 2, 3], keepdims=True)
        return mean + (images - mean) * self._uniform(images, 1.0 - self.amount, 1.0 + self.amount)


# Name: layer, whether the amount is in whole pixels, largest amount. Flip takes none.
_LAYERS: dict[str, tuple[type[_RandomImageLayer], bool, float]] = {
    "shift": (Shift, True, 1 << 15),
    "crop": (Crop, True, 1 << 15),
    "flip": (Flip, False, 0.0),
    "cutout": (Cutout, True, 1 << 15),
    "brightness": (Brightness, False, 1.0),
    "contrast": (Contrast, False, 1.0),
}


def names() -> tuple[str, ...]:
    """Returns the names that `--augment` accepts, sorted."""
    return tuple(sorted(_LAYERS))


def build(text: str, seed: int = 0, given: keras.layers.Layer | None = None) -> keras.layers.Layer | None:
    """Builds the augmentation that `--augment` names.

    Args:
      text: Names with amounts, applied in this order, e.g. `"crop:4,flip"`; `"none"` or empty for
        no augmentation.
      seed: Seed of the layers' generators; each layer has its own generator.
      given: A layer that a program gives instead.

    Returns:
      The given layer, a model without weights, or None for no augmentation.

    Raises:
      ConfigError: An unknown name (with suggestions), an amount that is missing or out of range, or something given
        that is no layer.
    """
    if isinstance(given, keras.layers.Layer):
        return given
    if given is not None:
        raise ConfigError(
            f"augmentation={given!r} is not a Keras layer. Give one, e.g. keras.layers.RandomFlip(), several in a "
            "keras.Sequential, or a function in a keras.layers.Lambda."
        )
    parts = _parse(text)
    if not parts:
        return None
    layers = [
        _LAYERS[name][0](amount, permutation.mix64(seed + number) >> 33, name=f"{name}_{number}")
        for number, (name, amount) in enumerate(parts)
    ]
    return keras.Sequential(layers, name="augment")


def check_augmentation(text: str, input_spec: Structure | None = None, source: Any = None) -> None:
    """Raises the errors of `build` without creating a layer, or using TensorFlow if no source is given.

    Args:
      text: The value of `--augment`.
      input_spec: The spec of one example's inputs (`SourceInfo.input_spec`), or the shape of a single one; if not
        None, the augmentation must suit it.
      source: The source of the examples. If it keeps them in memory, brightness that is too small for their values is
        warned of.

    Raises:
      ConfigError: As for `build`; or the examples are not images, are several, or are too small for the amount.
    """
    for name, amount in _parse(text):
        if input_spec is None:
            continue
        if isinstance(input_spec, tf.TensorSpec):
            _check_shape(name, amount, input_spec.shape)
        elif isinstance(input_spec, tf.TensorShape) or all(isinstance(size, int | None) for size in input_spec):
            _check_shape(name, amount, input_spec)
        else:
            raise ConfigError(
                f"--augment={name} changes one image per example, but the examples have several inputs. Leave out "
                "--augment, and put augmentation layers into the model."
            )
        if name == "brightness" and isinstance(source, Source) and source.info.storage == "memory":
            _warn_of_range(amount, source)


def _warn_of_range(amount: float, source: Source) -> None:
    """Warns where brightness can hardly be seen: in images of 0 to 255, it adds at most 1."""
    images, _ = source.fetch(tf.range(min(source.info.num_examples, _LOOKED_AT), dtype=tf.int64))
    largest = float(tf.reduce_max(tf.abs(images))) if tf.size(images) else 0.0
    if largest > _LARGEST:
        _log.warning(
            "--augment=brightness:%g adds at most %g to values of up to %g, which changes next to nothing. Scale the "
            "images to [0, 1]: tfpar.inputs.from_arrays(..., scale=1/255).",
            amount,
            amount,
            largest,
        )


def _check_shape(name: str, amount: float, shape: Sequence[int | None]) -> None:
    if len(shape) != 3:
        raise ConfigError(
            f"--augment={name} changes images [height, width, channels], but the examples have shape {tuple(shape)}. "
            "Leave out --augment."
        )
    smallest = min((size for size in shape[:2] if size is not None), default=None)
    if name == "crop" and smallest is not None and amount >= smallest:
        raise ConfigError(
            f"--augment=crop:{amount:g} mirrors more pixels than an image of {shape[0]}x{shape[1]} has. "
            + (f"Use at most crop:{smallest - 1}." if smallest > 1 else "Leave out crop.")
        )


def _parse(text: str) -> list[tuple[str, float]]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts == ["none"]:
        return []
    parsed = []
    for part in parts:
        name, _, amount = part.partition(":")
        if name not in _LAYERS:
            raise unknown_name("--augment", name, (*_LAYERS, "none"))
        parsed.append((name, _amount(text, name, amount)))
    return parsed


def _amount(text: str, name: str, amount: str) -> float:
    _, whole, largest = _LAYERS[name]
    if not largest:
        if amount:
            raise ConfigError(f"--augment={text!r}: {name} takes no amount, not {amount!r}. Write {name}.")
        return 0.0
    try:
        value = int(amount) if whole else float(amount)
    except ValueError:
        value = -1
    if not 0 < value <= largest:
        kind = "a positive whole number of pixels" if whole else f"a number above 0 and at most {largest:g}"
        example = f"{name}:{2 if whole else 0.2}"
        raise ConfigError(f"--augment={text!r}: {name} needs {kind}, not {amount!r}. Write e.g. {example}.")
    return value

"""A small convolutional network for small images (8x8 to 32x32)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.models import common
from tfpar.models.registry import TaskSpec, register

import keras

# Pooling stops at this height or width, so that the classifier sees where a stroke is.
SMALLEST_MAP = 2
# A larger last map is averaged instead; otherwise the classifier would outgrow the convolutions.
LARGEST_FLAT_MAP = 4


def _check_options(spec: TaskSpec, options: Mapping[str, Any]) -> None:
    common.check_image(spec, "convnet")
    common.check_options(options)
    if not common.check_sizes("widths", options["widths"]):
        raise ConfigError("--model_args widths=[]: a convnet needs at least one stage, e.g. widths=[32,64,128].")


@register("convnet", check=_check_options)
def convnet(
    spec: TaskSpec,
    *,
    widths: Sequence[int] = (32, 64, 128),
    kernel_size: int = 3,
    activation: str = "relu",
    initializer: str = "he_normal",
    normalization: str = "none",
    dropout: float = 0.0,
) -> keras.Model:
    """One stage per width: convolution, normalisation, activation, and 2x2 max pooling while the map is large enough.

    Args:
      spec: A classification task with examples [height, width, channels].
      widths: Channels of each stage.
      kernel_size: Side of the square kernels, in pixels.
      activation: One of `common.ACTIVATIONS`.
      initializer: Initialiser of the convolution kernels, one of `common.INITIALIZERS`.
      normalization: One of `common.NORMALIZATIONS`.
      dropout: Rate before the classifier.

    Raises:
      ConfigError: The task or the shape does not suit the model, or an option is out of range.
    """
    normalization = common.check_choice("normalization", normalization, common.NORMALIZATIONS)
    (kernel_size,) = common.check_sizes("kernel_size", kernel_size)
    inputs, x = common.input_layer(spec)
    for stage, width in enumerate(common.check_sizes("widths", widths)):
        x = keras.layers.Conv2D(
            width,
            kernel_size,
            padding="same",
            use_bias=common.needs_bias(normalization),
            kernel_initializer=common.resolve_initializer(initializer),
            name=f"conv{stage}",
        )(x)
        x = common.normalize(x, normalization, f"norm{stage}")
        x = common.activate(x, activation, f"activation{stage}")
        if min(x.shape[1], x.shape[2]) >= 2 * SMALLEST_MAP:
            x = keras.layers.MaxPooling2D(2, name=f"pool{stage}")(x)
    if max(x.shape[1], x.shape[2]) > LARGEST_FLAT_MAP:
        x = keras.layers.GlobalAveragePooling2D(name="average")(x)
    else:
        x = keras.layers.Flatten(name="flatten")(x)
    return keras.Model(inputs, common.classifier(x, spec, dropout))

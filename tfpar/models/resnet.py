"""Residual networks (He et al. 2015), for small and for ImageNet-sized images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.models import common
from tfpar.models.registry import TaskSpec, register

import keras

STEMS = ("cifar", "imagenet")
# From this height and width on, stem=None selects the ImageNet stem; the other stem keeps the resolution.
IMAGENET_STEM_FROM = 96
STAGE_WIDTHS = (64, 128, 256, 512)
BOTTLENECK_EXPANSION = 4


def _check_options(spec: TaskSpec, options: Mapping[str, Any]) -> None:
    common.check_image(spec, "resnet")
    common.check_options(options)
    depths = common.check_sizes("blocks", options["blocks"])
    if len(depths) > len(STAGE_WIDTHS):
        raise ValueError(
            f"blocks={list(depths)} has {len(depths)} stages, but there may be at most {len(STAGE_WIDTHS)}"
        )
    if options["stem"] is not None:
        common.check_choice("stem", options["stem"], STEMS)


@register("resnet18", check=_check_options, blocks=(2, 2, 2, 2), bottleneck=False)
@register("resnet34", check=_check_options, blocks=(3, 4, 6, 3), bottleneck=False)
@register("resnet50", check=_check_options, blocks=(3, 4, 6, 3), bottleneck=True)
def resnet(
    spec: TaskSpec,
    *,
    blocks: Sequence[int] = (2, 2, 2, 2),
    bottleneck: bool = False,
    stem: str | None = None,
    activation: str = "relu",
    initializer: str = "he_normal",
    normalization: str = "batch",
    dropout: float = 0.0,
) -> keras.Model:
    """Stem, four stages of residual blocks at widths 64 to 512, global average, linear classifier.

    The stride of bottleneck blocks is in their 3x3 convolution, not in the first 1x1, which adds no
    weights and improves accuracy (Goyal et al. 2017). The last normalisation of every block starts with scale
    0, so that every block starts as the identity (same paper, section 5.1); without normalisation,
    the last convolution starts at 0 for the same reason.

    Args:
      spec: A classification task with examples [height, width, channels].
      blocks: Number of residual blocks in each of up to four stages.
      bottleneck: Whether blocks are 1x1, 3x3, 1x1 with four times as many output channels, instead of two 3x3.
      stem: "cifar" is one 3x3 convolution; "imagenet" is 7x7 with stride 2 and 3x3 max pooling with stride 2. None
        selects "imagenet" from 96 pixels on.
      activation: One of `common.ACTIVATIONS`.
      initializer: Initialiser of the convolution kernels, one of `common.INITIALIZERS`.
      normalization: One of `common.NORMALIZATIONS`.
      dropout: Rate before the classifier.

    Raises:
      ConfigError: The task or the shape does not suit the model, or an option is out of range.
    """
    depths = common.check_sizes("blocks", blocks)
    if stem is None:
        stem = "imagenet" if min(spec.input_shape[:2]) >= IMAGENET_STEM_FROM else "cifar"
    normalization = common.check_choice("normalization", normalization, common.NORMALIZATIONS)
    builder = _BlockBuilder(activation, initializer, normalization)
    inputs, x = common.input_layer(spec)
    x = builder.conv_norm_act(
        x, STAGE_WIDTHS[0], "stem", kernel=7 if stem == "imagenet" else 3, stride=1 + (stem == "imagenet")
    )
    if stem == "imagenet":
        x = keras.layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, (depth, width) in enumerate(zip(depths, STAGE_WIDTHS, strict=False)):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            x = builder.residual(x, width, f"stage{stage}_block{block}", stride=stride, bottleneck=bottleneck)
    x = keras.layers.GlobalAveragePooling2D(name="average")(x)
    return keras.Model(inputs, common.classifier(x, spec, dropout))


class _BlockBuilder:
    """Builds the blocks of a residual network with one activation, initialiser and normalisation."""

    def __init__(self, activation: str, initializer: str, normalization: str) -> None:
        self.activation = activation
        self.initializer = initializer
        self.normalization = normalization

    def conv_norm(
        self,
        x: keras.KerasTensor,
        width: int,
        name: str,
        *,
        kernel: int,
        stride: int = 1,
        starts_at_zero: bool = False,
    ) -> keras.KerasTensor:
        """Applies a convolution and a normalisation; with `starts_at_zero` the initial output is 0."""
        normalized = self.normalization != "none"
        x = keras.layers.Conv2D(
            width,
            kernel,
            strides=stride,
            padding="same",
            use_bias=common.needs_bias(self.normalization),
            kernel_initializer="zeros"
            if starts_at_zero and not normalized
            else common.resolve_initializer(self.initializer),
            name=f"{name}_conv",
        )(x)
        options = {"gamma_initializer": "zeros"} if starts_at_zero and normalized else {}
        return common.normalize(x, self.normalization, f"{name}_norm", **options)

    def conv_norm_act(
        self, x: keras.KerasTensor, width: int, name: str, *, kernel: int, stride: int = 1
    ) -> keras.KerasTensor:
        x = self.conv_norm(x, width, name, kernel=kernel, stride=stride)
        return common.activate(x, self.activation, f"{name}_activation")

    def residual(
        self, x: keras.KerasTensor, width: int, name: str, *, stride: int, bottleneck: bool
    ) -> keras.KerasTensor:
        """Applies one residual block, with a projected shortcut if the shape changes (option B of the paper)."""
        out_width = width * BOTTLENECK_EXPANSION if bottleneck else width
        shortcut = x
        if stride != 1 or x.shape[-1] != out_width:
            shortcut = self.conv_norm(x, out_width, f"{name}_shortcut", kernel=1, stride=stride)
        if bottleneck:
            x = self.conv_norm_act(x, width, f"{name}_a", kernel=1)
            x = self.conv_norm_act(x, width, f"{name}_b", kernel=3, stride=stride)
            x = self.conv_norm(x, out_width, f"{name}_c", kernel=1, starts_at_zero=True)
        else:
            x = self.conv_norm_act(x, width, f"{name}_a", kernel=3, stride=stride)
            x = self.conv_norm(x, out_width, f"{name}_b", kernel=3, starts_at_zero=True)
        x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
        return common.activate(x, self.activation, f"{name}_activation")

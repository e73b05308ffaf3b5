"""Vision transformers (Dosovitskiy et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpar.models import common
from tfpar.models.registry import TaskSpec, register
from tfpar.models.transformer import NORMALIZATIONS, ClassToken, PositionEmbedding, TransformerBlock, make_norm

import keras

POOLS = ("token", "mean")
# patch_size=None selects the first of these that divides the image into at least MIN_PATCHES along each side.
PATCH_SIZES = (16, 8, 4, 2, 1)
MIN_PATCHES = 4


def _check_options(spec: TaskSpec, options: Mapping[str, Any]) -> None:
    common.check_image(spec, "vit")
    common.check_options(options, NORMALIZATIONS)
    common.check_choice("pool", options["pool"], POOLS)
    common.check_transformer(options["width"], options["depth"], options["heads"], options["mlp_ratio"])
    _patch_size(spec, options["patch_size"])


@register("vit", check=_check_options, width=192, depth=6, heads=3)
@register("vit_tiny", check=_check_options, width=192, depth=12, heads=3)
@register("vit_small", check=_check_options, width=384, depth=12, heads=6)
@register("vit_base", check=_check_options, width=768, depth=12, heads=12)
def vit(
    spec: TaskSpec,
    *,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    mlp_ratio: int = 4,
    patch_size: int | None = None,
    pool: str = "token",
    activation: str = "gelu",
    initializer: str = "glorot_uniform",
    normalization: str = "layer",
    dropout: float = 0.0,
) -> keras.Model:
    """Patches as tokens, learned positions, pre-norm encoder blocks, linear classifier.

    Args:
      spec: A classification task with examples [height, width, channels].
      width: Width of the residual stream.
      depth: Number of blocks.
      heads: Number of attention heads; divides `width`.
      mlp_ratio: Hidden units of a block's MLP over `width`.
      patch_size: Side of a patch in pixels; divides both sides of the image. None selects one of `PATCH_SIZES`.
      pool: The input of the classifier: a class "token", or the "mean" over patches.
      activation: One of `common.ACTIVATIONS`.
      initializer: Initialiser of the blocks' kernels, one of `common.INITIALIZERS`.
      normalization: "layer" or "rms".
      dropout: Rate after the position embedding and on every residual branch.

    Raises:
      ConfigError: The task, the shape or the patch size does not fit, or an option is out of range.
    """
    rate = common.check_fraction("dropout", dropout)
    patch_size = _patch_size(spec, patch_size)
    inputs, x = common.input_layer(spec)
    # This is the product of a patch with a matrix, so the patch is the fan-in of the initialiser.
    x = keras.layers.Conv2D(
        width, patch_size, strides=patch_size, kernel_initializer="lecun_normal", name="patch_embedding"
    )(x)
    x = keras.layers.Reshape((x.shape[1] * x.shape[2], width), name="tokens")(x)
    if pool == "token":
        x = ClassToken(name="class_embedding")(x)
    x = PositionEmbedding(name="position_embedding")(x)
    if rate:
        x = keras.layers.Dropout(rate, name="embedding_dropout")(x)
    for index in range(depth):
        x = TransformerBlock(
            heads,
            mlp_ratio * width,
            causal=False,
            activation=activation,
            initializer=initializer,
            normalization=normalization,
            dropout=rate,
            name=f"block{index}",
        )(x)
    x = make_norm(normalization, "final_norm")(x)
    x = x[:, 0] if pool == "token" else keras.layers.GlobalAveragePooling1D(name="average")(x)
    return keras.Model(inputs, common.classifier(x, spec, dropout=0.0))


def _patch_size(spec: TaskSpec, patch_size: int | None) -> int:
    """Returns the checked `patch_size`, or for None the one that suits the image."""
    height, width, _ = spec.input_shape
    if patch_size is None:
        divisors = [size for size in PATCH_SIZES if height % size == 0 and width % size == 0]
        large_enough = [size for size in divisors if min(height, width) // size >= MIN_PATCHES]
        return (large_enough or divisors[-1:])[0]
    (patch_size,) = common.check_sizes("patch_size", patch_size)
    if height % patch_size or width % patch_size:
        raise ValueError(f"patch_size={patch_size} does not divide the image of {height}x{width} pixels")
    return patch_size

"""Decoder-only transformer language models (Radford et al. 2019)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from tfpar.models import common
from tfpar.models.registry import TaskSpec, register
from tfpar.models.transformer import NORMALIZATIONS, PositionEmbedding, TokenEmbedding, TransformerBlock, make_norm

import keras
import tensorflow as tf


def _check_options(spec: TaskSpec, options: Mapping[str, Any]) -> None:
    common.check_task(spec, "language_model", "transformer_lm")
    common.check_options(options, NORMALIZATIONS)
    common.check_transformer(options["width"], options["depth"], options["heads"], options["mlp_ratio"])


@register("transformer_lm_tiny", check=_check_options, width=128, depth=4, heads=4)
@register("transformer_lm_small", check=_check_options, width=512, depth=8, heads=8)
@register("transformer_lm_gpt2", check=_check_options, width=768, depth=12, heads=12)
def transformer_lm(
    spec: TaskSpec,
    *,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    mlp_ratio: int = 4,
    tied_embeddings: bool = True,
    float32_logits: bool = True,
    activation: str = "gelu_tanh",
    initializer: str = "truncated_normal",
    normalization: str = "layer",
    dropout: float = 0.0,
) -> keras.Model:
    """Token and learned position embeddings, causal pre-norm blocks, next-token logits at every position.

    With width 768, depth 12, a vocabulary of 50,257 and 1,024 positions this is the 124M-parameter GPT-2.

    Args:
      spec: A language model task; its sequence length is the context length.
      width: Width of the residual stream.
      depth: Number of blocks.
      heads: Number of attention heads; divides `width`.
      mlp_ratio: Hidden units of a block's MLP over `width`.
      tied_embeddings: Whether the logits share the table of the token embeddings.
      float32_logits: Whether the last product computes in float32 under a mixed precision policy; False is faster if
        the vocabulary is large.
      activation: One of `common.ACTIVATIONS`.
      initializer: One of `common.INITIALIZERS`; scaled by 1 / sqrt(2 * depth) where kernels write to the stream.
      normalization: "layer" or "rms".
      dropout: Rate after the embeddings and on every residual branch.

    Raises:
      ConfigError: The task is not language modelling, or an option is out of range.
    """
    rate = common.check_fraction("dropout", dropout)
    logits_dtype = "float32" if float32_logits else keras.config.dtype_policy().compute_dtype
    # The table stays float32: lookups are cheap, and `logits_dtype` sets the dtype of the logits separately.
    make_table = functools.partial(TokenEmbedding, spec.num_classes, width, logits_dtype=logits_dtype, dtype="float32")
    embedding = make_table(name="token_embedding")
    inputs = keras.Input(spec.input_shape, dtype=spec.input_dtype, name="inputs")
    x = PositionEmbedding(name="position_embedding")(embedding(inputs))
    if rate:
        x = keras.layers.Dropout(rate, name="embedding_dropout")(x)
    for index in range(depth):
        x = TransformerBlock(
            heads,
            mlp_ratio * width,
            causal=True,
            activation=activation,
            initializer=initializer,
            normalization=normalization,
            dropout=rate,
            residual_scale=1.0 / math.sqrt(2.0 * depth),
            name=f"block{index}",
        )(x)
    x = make_norm(normalization, "final_norm")(x)
    output = embedding if tied_embeddings else make_table(name="logits")
    return keras.Model(inputs, output(x, reverse=True))


@keras.saving.register_keras_serializable("tfpar")
class BitsPerByte(keras.metrics.MeanMetricWrapper):
    """Cross-entropy in bits (nats / ln 2) per token, for models whose tokens are bytes.

    Args:
      name: Name of the metric.
      dtype: Of its result; float32 by default.
      from_logits: Whether the model's outputs are logits; otherwise they are probabilities.
    """

    def __init__(self, name: str = "bits_per_byte", dtype: Any = None, *, from_logits: bool = True) -> None:
        super().__init__(_bits, name=name, dtype=dtype, from_logits=from_logits)
        self.from_logits = from_logits

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"name": self.name, "dtype": self.dtype, "from_logits": self.from_logits}


def _bits(y: tf.Tensor, outputs: tf.Tensor, from_logits: bool) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=from_logits) / math.log(2.0)

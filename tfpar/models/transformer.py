"""The layers of the transformer families.

Shape suffixes: m examples, T positions, D model width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from tfpar.models import common

import keras
import tensorflow as tf
from keras import ops

NORMALIZATIONS = ("layer", "rms")
# The score of a masked position; finite, because -inf - -inf is NaN in a row that is masked completely.
MASKED = -1e30
EMBEDDING_STDDEV = 0.02


def attention(query: Any, key: Any, value: Any, *, causal: bool) -> Any:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1) with the softmax in float32.

    The queries are scaled rather than the scores, which are T/K times larger, and the mask is a comparison of two
    ranges, which XLA fuses into the softmax. `keras.ops.dot_product_attention` (3.15) computes the same, but
    on TensorFlow it materialises a mask of the full shape of the scores.

    Args:
      query: [m, T, H, K] of the compute dtype.
      key: Like `query`.
      value: Like `query`.
      causal: Whether position t sees positions 0 to t only.

    Returns:
      [m, T, H, K] of the dtype of `value`.
    """
    scores = ops.cast(ops.einsum("mthk,mshk->mhts", query * query.shape[-1] ** -0.5, key), "float32")
    if causal:
        positions = ops.arange(query.shape[1])
        scores = ops.where(positions[:, None] >= positions[None, :], scores, MASKED)
    weights = ops.cast(ops.softmax(scores, axis=-1), value.dtype)
    return ops.einsum("mhts,mshk->mthk", weights, value)


@keras.saving.register_keras_serializable(package="tfpar")
class TransformerBlock(keras.layers.Layer):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    One product computes query, key and value. Dropout acts on the output of each residual branch.
    """

    divides_positions = True  # see `tfpar.parallel.tensor.positions`

    def __init__(
        self,
        heads: int,
        mlp_width: int,
        *,
        causal: bool,
        activation: str = "gelu_tanh",
        initializer: str = "truncated_normal",
        normalization: str = "layer",
        dropout: float = 0.0,
        residual_scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        """Creates the block.

        Args:
          heads: Number of attention heads; divides the model width.
          mlp_width: Units of the hidden layer.
          causal: Whether a position sees only itself and earlier positions.
          activation: One of `common.ACTIVATIONS`.
          initializer: Initialiser of the kernels, one of `common.INITIALIZERS`.
          normalization: "layer" or "rms".
          dropout: Rate on both residual branches.
          residual_scale: Factor on the initial kernels that write to the residual stream; GPT-2 uses
            1 / sqrt(2 * depth), so that the variance does not grow with depth (Radford et al. 2019, section 2.3).
          **kwargs: As for `keras.layers.Layer`.
        """
        super().__init__(**kwargs)
        self.heads = heads
        self.mlp_width = mlp_width
        self.causal = causal
        self.activation = activation
        self.initializer = initializer
        self.normalization = normalization
        self.dropout = dropout
        self.residual_scale = residual_scale

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the weights for inputs [m, T, D].

        Raises:
          ValueError: The number of heads does not divide D.
        """
        width = int(input_shape[-1] or 0)
        if width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={width}; choose heads that divide the width")
        self.attention_norm = make_norm(self.normalization, "attention_norm", self.dtype_policy)
        self.qkv = self._dense(3 * width, "qkv")
        self.attention_out = self._dense(width, "attention_out", self.residual_scale)
        self.mlp_norm = make_norm(self.normalization, "mlp_norm", self.dtype_policy)
        self.mlp_in = self._dense(self.mlp_width, "mlp_in")
        self.mlp_out = self._dense(width, "mlp_out", self.residual_scale)
        for layer in (self.attention_norm, self.qkv, self.attention_out, self.mlp_norm, self.mlp_in):
            layer.build(input_shape)
        self.mlp_out.build((*input_shape[:-1], self.mlp_width))
        # Two layers, because each has its own random state.
        self.attention_dropout = self._make_dropout("attention_dropout")
        self.mlp_dropout = self._make_dropout("mlp_dropout")

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Maps [m, T, D] to [m, T, D] in the compute dtype."""
        width = inputs.shape[-1]
        qkv = self.qkv(self.attention_norm(inputs))
        positions = qkv.shape[1]  # more than the inputs have where positions are divided over devices
        own = qkv.shape[-1] // 3  # less than `width` where heads are divided over devices
        qkv = ops.reshape(qkv, (-1, positions, 3, own * self.heads // width, width // self.heads))
        # The gradient of `unstack` writes each element once; those of three slices write three tensors, mostly zeros.
        query, key, value = ops.unstack(qkv, num=3, axis=2)
        x = attention(query, key, value, causal=self.causal)
        x = self.attention_out(ops.reshape(x, (-1, positions, own)))
        if self.attention_dropout is not None:
            x = self.attention_dropout(x, training=training)
        inputs = inputs + x
        x = self.mlp_in(self.mlp_norm(inputs))
        x = self.mlp_out(common.resolve_activation(self.activation)(x))
        if self.mlp_dropout is not None:
            x = self.mlp_dropout(x, training=training)
        return inputs + x

    def tensor_layout(self) -> dict[keras.layers.Layer, str]:
        """Returns the ways in which tensor parallelism divides the layers, see `tfpar.parallel.tensor.layout`."""
        return {
            self.qkv: f"column:3x{self.heads}",
            self.attention_out: f"row:1x{self.heads}",
            self.mlp_in: "column",
            self.mlp_out: "row",
        }

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        keys = (
            "heads",
            "mlp_width",
            "causal",
            "activation",
            "initializer",
            "normalization",
            "dropout",
            "residual_scale",
        )
        return {**super().get_config(), **{key: getattr(self, key) for key in keys}}

    def _dense(self, units: int, name: str, scale: float = 1.0) -> keras.layers.Dense:
        initializer: Any = common.resolve_initializer(self.initializer)
        if scale != 1.0:
            initializer = ScaledInitializer(initializer, scale)
        return keras.layers.Dense(units, kernel_initializer=initializer, dtype=self.dtype_policy, name=name)

    def _make_dropout(self, name: str) -> keras.layers.Dropout | None:
        # A rate of 0 creates no layer, hence no random state in checkpoints.
        return keras.layers.Dropout(self.dropout, dtype=self.dtype_policy, name=name) if self.dropout else None


@keras.saving.register_keras_serializable(package="tfpar")
class ScaledInitializer(keras.initializers.Initializer):
    """The values of another initialiser times a constant."""

    def __init__(self, initializer: Any, scale: float) -> None:
        self.initializer = keras.initializers.get(initializer)
        self.scale = scale

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return self.initializer(shape, dtype=dtype) * self.scale

    def get_config(self) -> dict[str, Any]:
        return {"initializer": keras.initializers.serialize(self.initializer), "scale": self.scale}


@keras.saving.register_keras_serializable(package="tfpar")
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector per position to inputs [m, T, D]."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the table [T, D], drawn from a truncated normal distribution of standard deviation 0.02."""
        self.embeddings = self.add_weight(
            shape=input_shape[1:],
            initializer=keras.initializers.TruncatedNormal(stddev=EMBEDDING_STDDEV),
            name="embeddings",
        )

    def call(self, inputs: Any) -> Any:
        """Adds the table to every example."""
        return inputs + self.embeddings

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape


@keras.saving.register_keras_serializable(package="tfpar")
class ClassToken(keras.layers.Layer):
    """Prepends a learned vector to the sequence: [m, T, D] to [m, 1 + T, D]."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the vector [1, 1, D], initially 0."""
        self.embedding = self.add_weight(shape=(1, 1, input_shape[-1]), initializer="zeros", name="embedding")

    def call(self, inputs: Any) -> Any:
        """Prepends the vector to every example."""
        # Adds to a slice of zeros in order to broadcast: the batch size may be unknown while tracing.
        token = ops.zeros_like(inputs[:, :1]) + self.embedding
        return ops.concatenate([token, inputs], axis=1)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        examples, positions, width = input_shape
        return (examples, None if positions is None else positions + 1, width)


@keras.saving.register_keras_serializable(package="tfpar")
class TokenEmbedding(keras.layers.Layer):
    """Token vectors, and with `reverse=True` the logits from the same table (Press and Wolf 2016)."""

    def __init__(self, vocabulary: int, width: int, *, logits_dtype: str = "float32", **kwargs: Any) -> None:
        """Creates the layer.

        Args:
          vocabulary: Number of tokens, V.
          width: Width of a vector, D.
          logits_dtype: Compute dtype of the reverse product. The logits are float32 in any case.
          **kwargs: As for `keras.layers.Layer`.
        """
        super().__init__(**kwargs)
        self.vocabulary = vocabulary
        self.width = width
        self.logits_dtype = logits_dtype

    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        """Creates the table [V, D], drawn from a truncated normal distribution of standard deviation 0.02."""
        self.embeddings = self.add_weight(
            shape=(self.vocabulary, self.width),
            initializer=keras.initializers.TruncatedNormal(stddev=EMBEDDING_STDDEV),
            name="embeddings",
        )

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Looks up tokens, or scores vectors against every token.

        Args:
          inputs: Integer tokens [m, T], or vectors [m, T, D] with `reverse`.
          reverse: Whether to compute logits.

        Returns:
          Vectors [m, T, D], or float32 logits [m, T, V].
        """
        if not reverse:
            return ops.take(self.embeddings, inputs, axis=0)
        # One product of matrices: the gradient of a product of [m, T, D] and [D, V] has a term [D, V] for each example
        # (TensorFlow 2.21, `BatchMatMulV2`, with XLA too), which for m = 8 and GPT-2 are 1.2 GB.
        vectors, table = (tf.cast(each, self.logits_dtype) for each in (inputs, self.embeddings))
        logits = tf.matmul(tf.reshape(vectors, [-1, self.width]), table, transpose_b=True)
        return tf.cast(tf.reshape(logits, [*ops.shape(inputs)[:-1], table.shape[0]]), "float32")

    def tensor_layout(self) -> dict[keras.layers.Layer, str]:
        """Returns the way in which tensor parallelism divides the table: by tokens."""
        return {self: "vocabulary"}

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> keras.KerasTensor:
        """Returns the shape and dtype of `call`'s result; `compute_output_shape` does not receive `reverse`."""
        if reverse:
            return keras.KerasTensor((*inputs.shape[:-1], self.vocabulary), dtype="float32")
        return keras.KerasTensor((*inputs.shape, self.width), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary": self.vocabulary,
            "width": self.width,
            "logits_dtype": self.logits_dtype,
        }


def make_norm(normalization: str, name: str, dtype: Any = None) -> keras.layers.Layer:
    """Creates a normalisation over the model width, "layer" or "rms", with float32 statistics under every policy.

    Raises:
      ConfigError: The name is unknown.
    """
    common.check_choice("normalization", normalization, NORMALIZATIONS)
    if normalization == "rms":
        return keras.layers.RMSNormalization(epsilon=1e-6, dtype=dtype, name=name)
    return keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype, name=name)

"""Attention, the transformer's layers, and the language models."""

from __future__ import annotations

from tfpar import models
from tfpar.config import ConfigError
from tfpar.models import TaskSpec
from tfpar.models.transformer import TokenEmbedding, TransformerBlock, attention

import keras
import numpy as np
import pytest
import tensorflow as tf

TEXT = TaskSpec("language_model", (12,), "int32", 50)


def language_model(**options: object) -> keras.Model:
    return models.build("transformer_lm_tiny", TEXT, **{"width": 16, "heads": 2, "depth": 2, **options})


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (3, 12)).astype("int32")


@pytest.mark.parametrize("causal", [True, False])
def test_attention_matches_keras(causal: bool) -> None:
    query, key, value = tf.unstack(tf.random.normal((3, 2, 7, 4, 8)))
    expected = keras.ops.dot_product_attention(query, key, value, is_causal=causal)
    np.testing.assert_allclose(attention(query, key, value, causal=causal), expected, rtol=1e-5, atol=1e-6)


def test_attention_computes_its_softmax_in_float32() -> None:
    query, key, value = tf.unstack(tf.random.normal((3, 1, 64, 1, 8), seed=1))
    half = [tf.cast(x, "bfloat16") for x in (query, key, value)]
    result = attention(*half, causal=False)
    assert result.dtype == tf.bfloat16
    exact = attention(*(tf.cast(x, "float32") for x in half), causal=False)
    np.testing.assert_allclose(tf.cast(result, "float32"), exact, atol=0.02)


@pytest.mark.parametrize("position", [1, 6, 11])
def test_logits_do_not_depend_on_later_tokens(position: int) -> None:
    model = language_model()
    changed = tokens()
    changed[:, position] = (changed[:, position] + 1) % 50
    before, after = model(tokens()).numpy(), model(changed).numpy()
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    assert (np.abs(before[:, position:] - after[:, position:]).max(axis=(0, 2)) > 1e-6).all()


def test_a_vision_transformer_attends_to_every_patch() -> None:
    block = TransformerBlock(2, 32, causal=False)
    x = tf.random.normal((1, 5, 16))
    moved = tf.tensor_scatter_nd_update(x, [[0, 4]], tf.random.normal((1, 16)))
    assert np.abs(block(x)[:, 0] - block(moved)[:, 0]).max() > 1e-5


def test_logits_of_equal_tokens_differ_by_position() -> None:
    logits = language_model()(np.full((1, 12), 7, "int32"))[0].numpy()
    assert np.abs(logits[0] - logits[1]).max() > 1e-5


def test_tied_embeddings_save_one_table() -> None:
    tied, untied = language_model(), language_model(tied_embeddings=False)
    assert untied.count_params() - tied.count_params() == 50 * 16
    assert [w.path for w in untied.weights if w.path not in {v.path for v in tied.weights}] == ["logits/embeddings"]


def test_the_gradient_of_a_tied_table_sums_both_uses() -> None:
    layer = TokenEmbedding(5, 3)
    layer.build()
    ids = tf.constant([[1, 1]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(layer(ids), reverse=True))
    table = layer.embeddings.numpy()
    expected = np.tile(2 * table[1], (5, 1))
    expected[1] += 2 * table.sum(0)
    np.testing.assert_allclose(tape.gradient(loss, layer.embeddings.value), expected, rtol=1e-5)


def test_the_gradient_of_logits_has_one_table_for_all_examples() -> None:
    layer = TokenEmbedding(500, 30)
    layer.build()

    @tf.function
    def gradient(vectors: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(vectors, reverse=True) ** 2)
        return tape.gradient(loss, layer.embeddings.value)

    logits = tf.function(lambda vectors: layer(vectors, reverse=True))
    assert logits.get_concrete_function(tf.TensorSpec([None, 7, 30])).outputs[0].shape.as_list() == [None, 7, 500]
    operations = gradient.get_concrete_function(tf.TensorSpec([4, 7, 30])).graph.get_operations()
    sizes = [output.shape.num_elements() or 0 for operation in operations for output in operation.outputs]
    assert max(sizes) == 500 * 30  # more than the logits have


def test_logits_can_be_computed_in_half_precision() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    exact, fast = language_model(), language_model(float32_logits=False)
    fast.set_weights(exact.get_weights())
    one, other = exact(tokens()), fast(tokens())
    assert one.dtype == other.dtype == tf.float32
    assert np.abs(one - other).max() > 0
    np.testing.assert_allclose(one, other, atol=0.02)
    assert (other.numpy() == tf.cast(tf.cast(other, "bfloat16"), "float32").numpy()).all()


def test_residual_projections_start_smaller_with_depth() -> None:
    block = models.build("transformer_lm_tiny", TEXT, width=64, heads=2, depth=8).get_layer("block0")
    ratio = np.std(block.mlp_out.kernel) / np.std(block.mlp_in.kernel)
    assert ratio == pytest.approx(1 / 4, rel=0.05)


def test_dropout_acts_in_training_only() -> None:
    model = language_model(dropout=0.5)
    np.testing.assert_array_equal(model(tokens()), model(tokens()))
    first, second = model(tokens(), training=True), model(tokens(), training=True)
    assert np.abs(first - second).max() > 0.01
    assert not language_model().non_trainable_variables


def test_rms_normalization_is_an_option() -> None:
    model = language_model(normalization="rms")
    assert isinstance(model.get_layer("final_norm"), keras.layers.RMSNormalization)
    with pytest.raises(ConfigError, match="--model_args normalization='group'"):
        language_model(normalization="group")


def test_a_block_refuses_heads_that_do_not_divide_its_width() -> None:
    with pytest.raises(ValueError, match="heads=3 does not divide width=16"):
        TransformerBlock(3, 32, causal=False).build((None, 4, 16))


def test_bits_per_byte_of_logits_and_of_probabilities_are_the_same():
    targets = np.array([[2, 0]])
    logits = np.array([[[0.5, -1.0, 2.0], [3.0, 0.0, 1.0]]], np.float32)
    nats = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True).numpy().mean()
    of_probabilities = models.BitsPerByte.from_config(models.BitsPerByte(from_logits=False).get_config())
    np.testing.assert_allclose(models.BitsPerByte()(targets, logits), nats / np.log(2), rtol=1e-5)
    np.testing.assert_allclose(of_probabilities(targets, keras.ops.softmax(logits)), nats / np.log(2), rtol=1e-5)

"""Every family: size, output, saving, and training under XLA."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from tfpar import models
from tfpar.models import TaskSpec

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold


def images(size: int, channels: int, classes: int) -> TaskSpec:
    return TaskSpec("classification", (size, size, channels), "float32", classes)


DIGITS = images(8, 1, 10)
TEXT = TaskSpec("language_model", (16,), "int32", 50)

# One small member of every family, with dropout if it is an option, so that random state is involved.
SMALL: dict[str, tuple[TaskSpec, dict[str, Any]]] = {
    "mlp": (DIGITS, {"widths": [16], "normalization": "batch", "dropout": 0.1}),
    "convnet": (DIGITS, {"widths": [4, 8], "normalization": "group", "dropout": 0.1}),
    "resnet18": (DIGITS, {"blocks": [1, 1], "dropout": 0.1}),
    "resnet50": (DIGITS, {"blocks": [1], "normalization": "none"}),
    "vit": (DIGITS, {"width": 16, "depth": 1, "heads": 2, "dropout": 0.1}),
    "transformer_lm_tiny": (TEXT, {"width": 16, "depth": 1, "heads": 2, "dropout": 0.1}),
}


def small(name: str) -> tuple[keras.Model, TaskSpec]:
    spec, arguments = SMALL[name]
    return models.build(name, spec, **arguments), spec


def batch(spec: TaskSpec, size: int = 4) -> tuple[tf.Tensor, tf.Tensor]:
    random = np.random.default_rng(0)
    if spec.task == "language_model":
        tokens = random.integers(0, spec.num_classes, (size, spec.input_shape[0] + 1)).astype("int32")
        return tf.constant(tokens[:, :-1]), tf.constant(tokens[:, 1:])
    x = random.normal(size=(size, *spec.input_shape)).astype("float32")
    return tf.constant(x), tf.constant(random.integers(0, spec.num_classes, size).astype("int32"))


@pytest.mark.parametrize(
    ("name", "spec", "trainable"),
    [
        # From torchvision for the ResNets, and from the GPT-2 release; ResNet-50 and ViT-B are in test_summary.py.
        ("resnet18", images(32, 3, 10), 11_173_962),
        ("resnet18", images(224, 3, 1000), 11_689_512),
        ("resnet34", images(224, 3, 1000), 21_797_672),
        ("vit_tiny", images(224, 3, 1000), 5_717_416),
        ("transformer_lm_tiny", TaskSpec("language_model", (128,), "int32", 256), 842_496),
        ("transformer_lm_gpt2", TaskSpec("language_model", (1024,), "int32", 50_257), 124_439_808),
        ("convnet", DIGITS, 97_802),
        ("mlp", DIGITS, 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10),
    ],
)
def test_parameter_counts_match_published_ones(name: str, spec: TaskSpec, trainable: int) -> None:
    model = models.build(name, spec)
    assert sum(math.prod(weight.shape) for weight in model.trainable_weights) == trainable


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", SMALL)
def test_logits_are_float32_and_have_the_right_shape(name: str, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    model, spec = small(name)
    x, _ = batch(spec, 3)
    logits = model(x)
    leading = (3, *spec.input_shape) if spec.task == "language_model" else (3,)
    assert logits.dtype == tf.float32
    assert tuple(logits.shape) == (*leading, spec.num_classes)
    assert np.isfinite(logits.numpy()).all()
    assert all(weight.dtype == "float32" for weight in model.trainable_weights)
    assert policy.removeprefix("mixed_") in {layer.compute_dtype for layer in model.layers}


@pytest.mark.parametrize("name", SMALL)
def test_saved_and_loaded_models_compute_the_same(name: str, tmp_path: pathlib.Path) -> None:
    model, spec = small(name)
    x, _ = batch(spec)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path, safe_mode=True)
    assert loaded.name == name
    np.testing.assert_array_equal(loaded(x), model(x))
    assert [weight.path for weight in loaded.weights] == [weight.path for weight in model.weights]


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_the_same_with_and_without_xla(name: str) -> None:
    spec, arguments = SMALL[name]
    # Without dropout: XLA draws other random numbers from the same seed (TensorFlow 2.21).
    model = models.build(name, spec, **{**arguments, "dropout": 0.0})
    x, y = batch(spec)
    params = [tf.convert_to_tensor(weight) for weight in model.trainable_variables]
    state = [tf.convert_to_tensor(weight) for weight in model.non_trainable_variables]

    def loss_and_gradients(params: list[tf.Tensor], state: list[tf.Tensor]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(params)
            logits, new_state = model.stateless_call(params, state, x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        return loss, [tf.convert_to_tensor(g) for g in tape.gradient(loss, params)], new_state

    loss, gradients, new_state = tf.function(loss_and_gradients, jit_compile=True, autograph=False)(params, state)
    expected_loss, expected, expected_state = loss_and_gradients(params, state)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert any(np.abs(gradient).max() > 0 for gradient in gradients)
    for gradient, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-3, atol=1e-5)
    for value, other in zip(new_state, expected_state, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "transformer_lm_tiny"])
def test_xla_compiles_dropout_and_advances_its_state(name: str) -> None:
    model, spec = small(name)
    x, _ = batch(spec)
    params = [tf.convert_to_tensor(weight) for weight in model.trainable_variables]

    @tf.function(jit_compile=True, autograph=False)
    def call(state: list[tf.Tensor]) -> Any:
        return model.stateless_call(params, state, x, training=True)

    first, state = call([tf.convert_to_tensor(weight) for weight in model.non_trainable_variables])
    second, _ = call(state)
    again, _ = call(state)
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(second, again)


@pytest.mark.parametrize("normalization", ["none", "batch", "sync_batch", "layer", "group"])
@pytest.mark.parametrize("name", ["mlp", "convnet", "resnet18"])
def test_every_normalization_builds_and_trains(name: str, normalization: str) -> None:
    small_size = {"resnet18": {"blocks": [1, 1]}}.get(name, {"widths": [8, 12]})
    model = models.build(name, DIGITS, normalization=normalization, **small_size)
    x, y = batch(DIGITS, 16)
    weights = model.trainable_variables
    losses = []
    for _ in range(12):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        for weight, gradient in zip(weights, tape.gradient(loss, [w.value for w in weights]), strict=True):
            weight.assign_sub(0.05 * gradient)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert models.uses_synchronized_statistics(model) == (normalization == "sync_batch")
    biased = [layer.use_bias for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    assert all(bias == (normalization not in ("batch", "sync_batch")) for bias in biased)


@pytest.mark.parametrize(("size", "strides"), [(32, (1, 1)), (64, (1, 1)), (96, (2, 2)), (224, (2, 2))])
def test_the_stem_follows_the_image_size(size: int, strides: tuple[int, int]) -> None:
    model = models.build("resnet18", images(size, 3, 10), blocks=[1])
    stem = model.get_layer("stem_conv")
    assert stem.strides == strides
    assert stem.kernel_size == ((7, 7) if strides == (2, 2) else (3, 3))


@pytest.mark.parametrize("normalization", ["batch", "none"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_residual_blocks_start_as_the_identity(name: str, normalization: str) -> None:
    model = models.build(name, DIGITS, blocks=[2], normalization=normalization)
    before = model.get_layer("stage0_block1_add").input[0]
    after = model.get_layer("stage0_block1_activation").output
    inner = keras.Model(model.input, [before, after])
    first, second = inner(batch(DIGITS)[0])
    np.testing.assert_array_equal(first, second)
    assert float(tf.reduce_max(first)) > 0


@pytest.mark.parametrize(
    ("size", "patch_size"), [((8, 8), 2), ((32, 32), 8), ((64, 64), 16), ((224, 224), 16), ((9, 9), 1)]
)
def test_the_patch_size_follows_the_image_size(size: tuple[int, int], patch_size: int) -> None:
    model = models.build("vit", TaskSpec("classification", (*size, 3), "float32", 5), width=8, heads=1, depth=1)
    assert model.get_layer("patch_embedding").kernel_size == (patch_size, patch_size)


def test_mean_pooling_needs_no_class_token() -> None:
    model = models.build("vit", DIGITS, width=8, heads=1, depth=1, pool="mean")
    assert not any(layer.name == "class_embedding" for layer in model.layers)
    assert model(batch(DIGITS)[0]).shape == (4, 10)


def test_the_model_scales_bytes() -> None:
    raw = models.build("convnet", TaskSpec("classification", (8, 8, 1), "uint8", 10))
    scaled = models.build("convnet", DIGITS)
    scaled.set_weights(raw.get_weights())
    x = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1)).astype("uint8")
    np.testing.assert_allclose(raw(x), scaled(x.astype("float32") / 255.0), rtol=1e-4, atol=1e-5)


def test_the_convnets_classifier_stays_small_for_large_images() -> None:
    model = models.build("convnet", images(128, 3, 10))
    assert model.get_layer("logits").count_params() == 128 * 10 + 10


def test_the_convnet_learns_digits() -> None:
    """At least 0.98 on held-out digits, with the default options and a plain training loop."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    y = y.astype("int32")
    train, held_out = next(StratifiedKFold(5, shuffle=True, random_state=0).split(x, y))
    model = models.build("convnet", DIGITS)
    epochs, size = 8, 64
    steps = len(train) // size
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, epochs * steps))
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def gradients(params: list[tf.Tensor], x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(params)
            logits, _ = model.stateless_call(params, [], x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        return tape.gradient(loss, params)

    @tf.function(autograph=False)
    def update(x: tf.Tensor, y: tf.Tensor) -> None:
        optimizer.apply(gradients([w.value for w in model.trainable_variables], x, y), model.trainable_variables)

    random = np.random.default_rng(0)
    for _ in range(epochs):
        order = random.permutation(train)
        for index in range(steps):
            chosen = order[index * size : (index + 1) * size]
            update(x[chosen], y[chosen])
    predicted = tf.argmax(model(x[held_out]), -1)
    assert np.mean(predicted == y[held_out]) >= 0.98

"""Costs compared with hand calculations and published figures."""

from __future__ import annotations

import itertools
import time

from tfpar import models
from tfpar.config import ConfigError
from tfpar.models import TaskSpec, peak
from tfpar.process.cores import cores

import keras
import pytest
import tensorflow as tf

IMAGENET = TaskSpec("classification", (224, 224, 3), "float32", 1000)


def test_the_cost_of_a_perceptron_is_exact() -> None:
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(7, "relu"), keras.layers.Dense(3)])
    summary = models.describe(model, batch_size=4)
    assert summary.parameters == summary.trainable_parameters == 20 * 7 + 7 + 7 * 3 + 3
    assert summary.forward_flops_per_example == 2 * (20 * 7 + 7 * 3)
    assert summary.training_flops_per_example == 3 * summary.forward_flops_per_example
    # Saved: the input, the ReLU's output (which its gradient and the next product share), the loss' log-softmax.
    assert summary.activation_bytes_per_example == 4 * (20 + 7 + 3)
    assert summary.uncounted == ()


@pytest.mark.filterwarnings("error")
def test_inputs_come_in_the_models_structure():
    """Keras warns of a list where a model was made with a dict."""
    inputs = {"wide": keras.Input((5,), name="wide"), "narrow": keras.Input((2,), name="narrow")}
    outputs = keras.layers.Dense(3)(keras.layers.Concatenate()([inputs["wide"], inputs["narrow"]]))
    assert models.describe(keras.Model(inputs, outputs)).forward_flops_per_example == 2 * 7 * 3


@pytest.mark.parametrize(
    ("layer", "shape", "flops"),
    [
        (keras.layers.Conv2D(6, 3, padding="same"), (8, 8, 4), 2 * 8 * 8 * 6 * 9 * 4),
        (keras.layers.Conv2D(6, 3, groups=2, padding="same"), (8, 8, 4), 2 * 8 * 8 * 6 * 9 * 2),
        (keras.layers.Conv2D(6, 2, strides=2), (8, 8, 4), 2 * 4 * 4 * 6 * 4 * 4),
        (keras.layers.Conv1D(6, 3, padding="same"), (8, 4), 2 * 8 * 6 * 3 * 4),
        (keras.layers.Conv3D(2, 2), (4, 4, 4, 3), 2 * 27 * 2 * 8 * 3),
        (keras.layers.Conv2DTranspose(6, 2, strides=2), (4, 4, 3), 2 * 4 * 4 * 3 * 4 * 6),
        (keras.layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2), (8, 8, 4), 2 * 8 * 8 * 8 * 9),
        (keras.layers.EinsumDense("abc,cde->abde", (None, 5, 6)), (3, 4), 2 * 3 * 4 * 5 * 6),
        (keras.layers.Dense(5), (3, 4), 2 * 3 * 4 * 5),
        (keras.layers.LSTM(5), (7, 4), 2 * 7 * (4 + 5) * 20),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, keras.layers.Layer) else "",
)
def test_the_flops_of_layers_are_exact(layer: keras.layers.Layer, shape: tuple[int, ...], flops: int) -> None:
    model = keras.Sequential([keras.Input(shape), layer])
    for batch_size in (1, 3):
        assert models.describe(model, batch_size).forward_flops_per_example == flops


@pytest.mark.parametrize(
    ("name", "trainable", "gflops"),
    # Published as multiply-adds: 4.09 G for ResNet-50 (torchvision), 17.6 G for ViT-B/16 (Touvron et al. 2021).
    [("resnet50", 25_557_032, 8.18), ("vit_base", 86_567_656, 35.1)],
)
def test_costs_match_published_models(name: str, trainable: int, gflops: float) -> None:
    summary = models.describe(models.build(name, IMAGENET))
    assert summary.trainable_parameters == trainable
    assert summary.forward_flops_per_example / 1e9 == pytest.approx(gflops, rel=0.01)
    assert summary.uncounted == ()


def test_the_cost_of_a_language_model_matches_the_formula() -> None:
    length, width, depth, vocabulary = 32, 16, 2, 50
    spec = TaskSpec("language_model", (length,), "int32", vocabulary)
    model = models.build("transformer_lm_tiny", spec, width=width, depth=depth, heads=4)
    products = depth * 12 * width**2 + vocabulary * width
    attention = depth * 2 * length * width
    assert models.describe(model, 2).forward_flops_per_example == 2 * length * (products + attention)


def test_activations_halve_in_half_precision_and_do_not_depend_on_the_batch() -> None:
    def of(policy: str, batch_size: int) -> int:
        keras.config.set_dtype_policy(policy)
        model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64, "relu") for _ in range(10))])
        return models.describe(model, batch_size).activation_bytes_per_example

    assert of("float32", 1) == of("float32", 8)
    assert of("mixed_bfloat16", 1) == pytest.approx(of("float32", 1) / 2, rel=0.1)


def test_counting_does_not_change_the_model() -> None:
    model = models.build("mlp", TaskSpec("classification", (6,), "float32", 3), normalization="batch", dropout=0.5)
    before = [weight.numpy() for weight in model.variables]
    models.describe(model)
    assert all((old == new.numpy()).all() for old, new in zip(before, model.variables, strict=True))


def test_counting_works_under_a_strategy() -> None:
    spec = TaskSpec("classification", (8, 8, 1), "float32", 10)
    expected = models.describe(models.build("convnet", spec, normalization="sync_batch"))
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        assert models.describe(models.build("convnet", spec, normalization="sync_batch")) == expected


def test_several_inputs_and_outputs_are_counted() -> None:
    first, second = keras.Input((4,)), keras.Input((6,))
    outputs = [keras.layers.Dense(3)(first), keras.layers.Dense(2)(second)]
    assert models.describe(keras.Model([first, second], outputs)).forward_flops_per_example == 2 * (12 + 12)


def test_models_of_unknown_cost_are_refused() -> None:
    with pytest.raises(ValueError, match="depends on an unknown dimension"):
        models.describe(keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match="batch_size=0"):
        models.describe(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), 0)

    class Opaque(keras.Model):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x

    with pytest.raises(ValueError, match="no symbolic inputs"):
        models.describe(Opaque())


def test_the_summary_is_formatted_as_text() -> None:
    summary = models.ModelSummary(11_183_562, 11_173_962, 1_110_000_000, 3_330_000_000, 7_000_000)
    text = models.format_summary(summary, "resnet18")
    assert text.splitlines()[0] == "resnet18: 11,173,962 trainable parameters, 9,600 others, 42.7 MiB as float32"
    assert "1.11 GFLOPs forward, 3.33 GFLOPs to train" in text
    assert "6.68 MiB of activations" in text
    assert "at least" not in text
    partial = models.ModelSummary(1, 1, 0, 0, 0, ("while",))
    assert "at least 0 FLOPs" in models.format_summary(partial)


def test_the_source_of_a_cpu_figure_is_a_measurement() -> None:
    found = models.peak_flops("float32")
    assert found.flops > 1e8
    assert found.threads == cores()
    assert "measured" in found.source


@pytest.mark.parametrize(("seconds", "products"), [(0.001, 12), (0.03, 4), (10.0, 2)])
def test_measuring_ends_at_its_deadline_or_after_twelve_products(
    monkeypatch: pytest.MonkeyPatch, seconds: float, products: int
) -> None:
    product, calls = tf.matmul, itertools.count(1)
    monkeypatch.setattr(tf, "matmul", lambda a, b: next(calls) and product(a, b))
    monkeypatch.setattr(time, "perf_counter", itertools.count(0.0, seconds).__next__)  # two readings a product
    peak._measure.cache_clear()
    try:
        found = models.peak_flops("float32")
        assert next(calls) - 1 == products
        assert models.peak_flops("float32") is found  # once per process
        assert next(calls) - 2 == products
    finally:
        peak._measure.cache_clear()  # at the speed of another clock


@pytest.mark.parametrize(
    ("cores", "threads", "replicas", "share"),
    [(8, 8, 1, 1.0), (8, 8, 2, 0.5), (2, 1, 2, 1.0), (2, 1, 4, 0.5), (8, 2, 3, 1.0), (8, 0, 4, 1.0)],
)
def test_replicas_share_the_cores_of_their_threads(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, replicas: int, share: float
) -> None:
    monkeypatch.setattr(peak, "cores_of_host", lambda: cores)
    assert models.PeakFlops(8e9, "", threads).of_replica(replicas) == 8e9 * share


@pytest.mark.parametrize(("given", "expected"), [("1", 1), ("0", None), ("", None), ("100000", None), ("many", None)])
def test_the_measurement_uses_the_threads_set_by_the_launcher(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: int | None
) -> None:
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", given)
    assert models.peak_flops("float32").threads == (expected or cores())


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="--precision='float8'"):
        models.peak_flops("float8")


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", True, 312.0),
        ("NVIDIA A100-SXM4-80GB", "float32", True, 156.0),
        ("NVIDIA A100-SXM4-80GB", "float32", False, 19.5),
        ("NVIDIA A10", "bfloat16", True, 125.0),
        ("NVIDIA A10G", "bfloat16", True, 70.0),
        ("NVIDIA H100 80GB HBM3", "float16", True, 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", True, 756.0),
        ("NVIDIA H200", "bfloat16", True, 989.4),
        ("NVIDIA L40S", "bfloat16", True, 362.1),
        ("NVIDIA L4", "bfloat16", True, 121.0),
        ("Tesla V100-SXM2-16GB", "float16", True, 125.0),
        ("Tesla V100-SXM2-16GB", "float32", True, 15.7),
        ("Tesla V100-SXM2-16GB", "bfloat16", True, 15.7),
        ("Tesla T4", "float16", True, 65.0),
    ],
)
def test_gpus_are_looked_up_by_the_name_that_tensorflow_reports(
    name: str, dtype: str, tf32: bool, tflops: float
) -> None:
    found = peak.lookup_gpu(name, dtype, tf32)
    assert found is not None
    assert found.flops == pytest.approx(tflops * 1e12)
    assert not found.threads


@pytest.mark.parametrize(
    "name", ["NVIDIA Something 9000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"]
)
def test_an_unknown_gpu_or_a_slice_of_one_has_no_figure(name: str) -> None:
    assert peak.lookup_gpu(name, "float32", True) is None


@pytest.mark.parametrize(
    ("layers", "share"),
    [
        (lambda: [keras.layers.Conv2D(8, 3), keras.layers.Flatten(), keras.layers.Dense(64)], (0.1, 0.9)),
        (lambda: [keras.layers.Conv2DTranspose(8, 3), keras.layers.DepthwiseConv2D(3)], (1.0, 1.0)),
        (lambda: [keras.layers.Flatten(), keras.layers.Dense(64)], (0.0, 0.0)),
    ],
)
def test_the_convolution_share_is_a_share_of_the_flops(layers, share):
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.Sequential(layers())])
    low, high = share
    assert low <= models.describe(model).convolution_share <= high
    assert models.uses_convolutions(model) == (high > 0)

"""Code that the model families share: choices of activation, initialiser and normalisation, and checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError, unknown_name
from tfpar.models.normalization import BatchNormalization
from tfpar.models.registry import TaskSpec

import keras

ACTIVATIONS = ("relu", "leaky_relu", "elu", "selu", "gelu", "gelu_tanh", "silu", "mish", "softplus", "tanh", "sigmoid")
INITIALIZERS = (
    "he_normal",
    "he_uniform",
    "glorot_normal",
    "glorot_uniform",
    "lecun_normal",
    "lecun_uniform",
    "orthogonal",
    "truncated_normal",
)
NORMALIZATIONS = ("none", "batch", "sync_batch", "layer", "group")

# Goyal et al. 2017, section 5.1: epsilon 1e-5 and a momentum of 0.9 for the moving statistics.
BATCH_NORM_EPSILON = 1e-5
BATCH_NORM_MOMENTUM = 0.9


@keras.saving.register_keras_serializable(package="tfpar")
def gelu_tanh(x: Any) -> Any:
    """GELU in its tanh approximation, as in GPT-2 (Hendrycks and Gimpel 2016): x of any shape; keeps the dtype."""
    return keras.activations.gelu(x, approximate=True)


def check_choice(option: str, value: Any, choices: Iterable[str]) -> str:
    """Returns the value of an enumerated model option, or raises the error that lists the choices.

    `--model_args normalization=none` arrives as None, because the flag's parser converts `none`.

    Raises:
      ConfigError: The value is not one of `choices`.
    """
    choices = tuple(choices)
    if value is None and "none" in choices:
        return "none"
    if value not in choices:
        raise unknown_name(f"--model_args {option}", str(value), choices)
    return str(value)


def check_fraction(option: str, value: float) -> float:
    """Returns a rate in [0, 1), such as dropout.

    Raises:
      ConfigError: The value is not a number in [0, 1).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise ConfigError(f"--model_args {option}={value!r} is out of range: it must be at least 0 and less than 1.")
    return float(value)


def check_sizes(option: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """Returns one size or a list of sizes, all positive integers, as a tuple.

    Raises:
      ConfigError: A size is not a positive integer.
    """
    sizes = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(
            f"--model_args {option}={value!r} must be a positive whole number, or a list such as [64,128]."
        )
    return sizes


def check_transformer(width: int, depth: int, heads: int, mlp_ratio: int) -> None:
    """Refuses sizes of a transformer that do not fit together.

    Raises:
      ConfigError: A size is not a positive whole number, or the heads do not divide the width.
    """
    for option, size in (("width", width), ("depth", depth), ("heads", heads), ("mlp_ratio", mlp_ratio)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"--model_args {option}={size!r} must be a positive whole number.")
    if width % heads:
        raise ConfigError(
            f"--model_args width={width},heads={heads}: the heads must divide the width evenly. "
            f"Choose a width that is a multiple of {heads}."
        )


def check_options(options: Mapping[str, Any], normalizations: Iterable[str] = NORMALIZATIONS) -> None:
    """Checks the options that families have in common by name, and ignores other options.

    Raises:
      ConfigError: A value is not allowed.
    """
    choices = {"activation": ACTIVATIONS, "initializer": INITIALIZERS, "normalization": normalizations}
    for option, value in options.items():
        if option in choices:
            check_choice(option, value, choices[option])
        elif option == "dropout":
            check_fraction(option, value)
        elif option in ("widths", "blocks", "kernel_size"):
            check_sizes(option, value)


def check_task(spec: TaskSpec, task: str, family: str) -> None:
    """Refuses a data set for another task.

    Raises:
      ConfigError: `spec.task` is not `task`.
    """
    if spec.task != task:
        suitable = {
            "classification": "an image or feature data set, e.g. --dataset=digits",
            "language_model": "a text data set, e.g. --dataset=text",
        }
        raise ConfigError(
            f"--model: {family} is for the task {task!r}, but the data set is for {spec.task!r}. "
            f"Choose another --model, or {suitable[task]}."
        )


def check_image(spec: TaskSpec, family: str) -> None:
    """Refuses data that is not for image classification.

    Raises:
      ConfigError: The task is not classification, or the examples are not [height, width, channels].
    """
    check_task(spec, "classification", family)
    check_classifier_dtype(spec)
    if len(spec.input_shape) != 3:
        raise ConfigError(
            f"--model: {family} reads images [height, width, channels], but the data set's examples have shape "
            f"{spec.input_shape}. Choose --model=mlp, which reads any shape."
        )


def check_classifier_dtype(spec: TaskSpec) -> None:
    """Refuses dtypes that a classifier cannot use.

    Raises:
      ConfigError: The dtype is an integer other than uint8, which has no natural scale.
    """
    if spec.input_dtype != "uint8" and not spec.input_dtype.startswith(("float", "bfloat")):
        raise ConfigError(
            f"input_dtype={spec.input_dtype!r}: a classifier reads floating point, or uint8 images. "
            "Cast the examples in the input pipeline."
        )


def input_layer(spec: TaskSpec) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Creates the model's input, and the same values as floating point.

    The model itself scales bytes (uint8 images) to [0, 1], so a quarter of the data crosses to the device.

    Returns:
      The symbolic input [m, *input_shape] of `spec.input_dtype`, and the same as floating point.

    Raises:
      ConfigError: The dtype is an integer other than uint8, which has no natural scale.
    """
    check_classifier_dtype(spec)
    inputs = keras.Input(spec.input_shape, dtype=spec.input_dtype, name="inputs")
    if spec.input_dtype == "uint8":
        return inputs, keras.layers.Rescaling(1.0 / 255.0, name="rescaling")(inputs)
    return inputs, inputs


def activate(x: keras.KerasTensor, activation: str, name: str) -> keras.KerasTensor:
    """Applies an activation by name, as a separate layer."""
    return keras.layers.Activation(resolve_activation(activation), name=name)(x)


def resolve_activation(activation: str) -> Any:
    """Returns the function with this activation's name.

    Raises:
      ConfigError: The name is unknown.
    """
    check_choice("activation", activation, ACTIVATIONS)
    return gelu_tanh if activation == "gelu_tanh" else keras.activations.get(activation)


def resolve_initializer(initializer: str) -> keras.initializers.Initializer:
    """Creates a kernel initialiser by name; "truncated_normal" has a standard deviation of 0.02.

    Each call returns a new object: Keras warns when one unseeded initialiser fills several weights.

    Raises:
      ConfigError: The name is unknown.
    """
    check_choice("initializer", initializer, INITIALIZERS)
    if initializer == "truncated_normal":
        return keras.initializers.TruncatedNormal(stddev=0.02)
    return keras.initializers.get(initializer)


def normalize(x: keras.KerasTensor, normalization: str, name: str, **options: Any) -> keras.KerasTensor:
    """Applies a normalisation by name over the last (channel) dimension.

    Args:
      x: Activations [m, ..., channels].
      normalization: One of `NORMALIZATIONS`. "batch" uses the statistics of the replica's
        micro-batch, "sync_batch" those of all replicas; both ignore padding. "group" has up to
        32 groups (Wu and He 2018). "layer" normalises the channels of each position.
      name: Name of the layer.
      **options: More arguments of the layer, such as `gamma_initializer`.

    Raises:
      ConfigError: The name is unknown.
    """
    normalization = check_choice("normalization", normalization, NORMALIZATIONS)
    if normalization == "none":
        return x
    layer: keras.layers.Layer
    if normalization == "layer":
        layer = keras.layers.LayerNormalization(epsilon=1e-6, name=name, **options)
    elif normalization == "group":
        groups = math.gcd(32, x.shape[-1])
        layer = keras.layers.GroupNormalization(groups=groups, epsilon=1e-5, name=name, **options)
    else:
        layer = BatchNormalization(
            momentum=BATCH_NORM_MOMENTUM,
            epsilon=BATCH_NORM_EPSILON,
            synchronized=normalization == "sync_batch",
            name=name,
            **options,
        )
    return layer(x)


def needs_bias(normalization: str) -> bool:
    """Whether a layer before this normalisation needs a bias; batch normalisation would subtract it."""
    return normalization not in ("batch", "sync_batch")


def classifier(x: keras.KerasTensor, spec: TaskSpec, dropout: float) -> keras.KerasTensor:
    """Maps features [m, features] to float32 logits [m, num_classes], after dropout.

    The layer computes in float32 under every dtype policy: half-precision logits would reduce the
    accuracy of the softmax, and one float32 product takes little time.
    """
    if check_fraction("dropout", dropout):
        x = keras.layers.Dropout(dropout, name="dropout")(x)
    return keras.layers.Dense(
        spec.num_classes, kernel_initializer=resolve_initializer("glorot_uniform"), dtype="float32", name="logits"
    )(x)

"""The cost of a model, printed before training and used for the MFU figure."""

from __future__ import annotations

import dataclasses
import math

from tfpar.models import graph_cost
from tfpar.models.peak import PeakFlops, peak_flops
from tfpar.optim.keras_internals import all_layers

import keras

_CONVOLUTIONS = tuple(
    getattr(keras.layers, kind.format(dims))
    for kind, most in (
        *(("Conv{}D", 3), ("Conv{}DTranspose", 3), ("ConvLSTM{}D", 3)),
        *(("DepthwiseConv{}D", 2), ("SeparableConv{}D", 2)),
    )
    for dims in range(1, most + 1)
)

__all__ = ["ModelSummary", "PeakFlops", "describe", "format_summary", "peak_flops"]

# The forward pass, the gradient of the activations and the gradient of the weights each cost about the same.
TRAINING_OVER_FORWARD = 3


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """Size and cost of a model.

    Attributes:
      parameters: Number of elements of all weights, with batch statistics, without states of random generators.
      trainable_parameters: Number of elements of the trainable weights.
      forward_flops_per_example: FLOPs of matrix products and convolutions; a multiply-add counts as two.
      training_flops_per_example: Three times the forward figure, the convention of MFU.
      activation_bytes_per_example: Bytes that the forward pass saves for the backward pass, before fusion: an upper
        bound of what XLA keeps.
      uncounted: Names of operations whose shapes are unknown before they run; if there are any, the figures are
        lower bounds.
      convolution_share: Fraction of the FLOPs in convolutions.
    """

    parameters: int
    trainable_parameters: int
    forward_flops_per_example: int
    training_flops_per_example: int
    activation_bytes_per_example: int
    uncounted: tuple[str, ...] = ()
    convolution_share: float = 0.0


def describe(model: keras.Model, batch_size: int = 1) -> ModelSummary:
    """Counts a model's parameters, FLOPs and activations, without running it.

    Args:
      model: A built Keras model with symbolic inputs whose shapes are known except for the batch.
      batch_size: Number of examples in the traced batch. The figures are per example, so it matters only if the cost
        of the model is not proportional to it.

    Raises:
      ValueError: The model has no symbolic inputs, the shape of an input is not known, or `batch_size` is less than 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    cost = graph_cost.count(model, batch_size)
    forward = round(cost.forward_flops / batch_size)
    return ModelSummary(
        parameters=_count_elements(model.weights),
        trainable_parameters=_count_elements(model.trainable_weights),
        forward_flops_per_example=forward,
        training_flops_per_example=TRAINING_OVER_FORWARD * forward,
        activation_bytes_per_example=round(cost.saved_bytes / batch_size),
        uncounted=cost.uncounted,
        convolution_share=cost.convolution_flops / max(cost.forward_flops, 1),
    )


def uses_max_pooling(model: keras.Model) -> bool:
    """Whether the model, including nested models, has a max pooling layer of Keras."""
    pooling = (keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D)
    return any(isinstance(layer, pooling) for layer in all_layers(model))


def uses_convolutions(model: keras.Model) -> bool:
    """Whether the model, including nested models, has a convolution layer of Keras."""
    return any(isinstance(layer, _CONVOLUTIONS) for layer in all_layers(model))


def is_of_known_layers(model: keras.Model) -> bool:
    """Whether all layers belong to Keras or tfpar, so that their types determine what they compute."""
    return all(type(layer).__module__.partition(".")[0] in ("keras", "tfpar") for layer in all_layers(model))


def format_summary(summary: ModelSummary, name: str = "model") -> str:
    """Formats the summary as three short lines.

    Args:
      summary: The result of `describe`.
      name: Name of the model.
    """
    at_least = "at least " if summary.uncounted else ""
    others = summary.parameters - summary.trainable_parameters
    lines = [
        f"{name}: {summary.trainable_parameters:,} trainable parameters"
        + (f", {others:,} others" if others else "")
        + f", {_scaled(4 * summary.parameters, 1024, _BYTES)} as float32",
        f"  per example: {at_least}{_scaled(summary.forward_flops_per_example, 1000, _FLOPS)} forward, "
        f"{_scaled(summary.training_flops_per_example, 1000, _FLOPS)} to train",
        f"  per example: {at_least}{_scaled(summary.activation_bytes_per_example, 1024, _BYTES)} of activations kept "
        "for the backward pass, before fusion",
    ]
    return "\n".join(lines)


_FLOPS = ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs")
_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while value >= base and power < len(units) - 1:
        value /= base
        power += 1
    return f"{value:,.3g} {units[power]}" if value < 1000 else f"{value:,.0f} {units[power]}"


def _count_elements(weights: list[keras.Variable]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)

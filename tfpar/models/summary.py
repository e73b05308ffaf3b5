"""What a model costs, printed before training and used for the MFU figure."""

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

# Forward, the gradient with respect to activations, and with respect to weights: each about the forward's cost.
TRAINING_OVER_FORWARD = 3


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """Size and cost of a model.

    Attributes:
      parameters: Numbers in all weights, batch statistics included, states of random generators left out.
      trainable_parameters: Numbers in the trainable weights.
      forward_flops_per_example: Of matrix products and convolutions, a multiply-add being two.
      training_flops_per_example: Three times the forward figure, the convention of MFU.
      activation_bytes_per_example: Bytes that the backward pass needs of the forward pass, before fusion: an upper
        bound of what XLA keeps.
      uncounted: Names of operations whose shapes are unknown before they run; with any, the figures are lower bounds.
      convolution_share: Share of the FLOPs that is in convolutions.
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
      model: A built Keras model with symbolic inputs whose shapes are known but for the batch.
      batch_size: Examples in the batch that is traced. Figures are per example, so it matters only to models whose
        cost is not proportional to it.

    Raises:
      ValueError: The inputs are not known, or `batch_size` is less than 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    cost = graph_cost.count(model, batch_size)
    forward = round(cost.forward_flops / batch_size)
    return ModelSummary(
        parameters=_numbers(model.weights),
        trainable_parameters=_numbers(model.trainable_weights),
        forward_flops_per_example=forward,
        training_flops_per_example=TRAINING_OVER_FORWARD * forward,
        activation_bytes_per_example=round(cost.saved_bytes / batch_size),
        uncounted=cost.uncounted,
        convolution_share=cost.convolution_flops / max(cost.forward_flops, 1),
    )


def uses_max_pooling(model: keras.Model) -> bool:
    """Whether a layer of the model is a max pooling of Keras, nested models included."""
    pooling = (keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D)
    return any(isinstance(layer, pooling) for layer in all_layers(model))


def uses_convolutions(model: keras.Model) -> bool:
    """Whether a layer of the model is a convolution of Keras, nested models included."""
    return any(isinstance(layer, _CONVOLUTIONS) for layer in all_layers(model))


def is_of_known_layers(model: keras.Model) -> bool:
    """Whether all layers are of Keras or of tfpar, so that what they compute is told by their types."""
    return all(type(layer).__module__.partition(".")[0] in ("keras", "tfpar") for layer in all_layers(model))


def format_summary(summary: ModelSummary, name: str = "model") -> str:
    """The summary as three short lines.

    Args:
      summary: From `describe`.
      name: What the model is called.
    """
    at_least = "at least " if summary.uncounted else ""
    fixed = summary.parameters - summary.trainable_parameters
    lines = [
        f"{name}: {summary.trainable_parameters:,} trainable parameters"
        + (f", {fixed:,} others" if fixed else "")
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
    place = 0
    while value >= base and place < len(units) - 1:
        value /= base
        place += 1
    return f"{value:,.3g} {units[place]}" if value < 1000 else f"{value:,.0f} {units[place]}"


def _numbers(weights: list[keras.Variable]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)

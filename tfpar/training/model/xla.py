"""The properties of a model that decide whether XLA compiles it."""

from __future__ import annotations

from collections.abc import Callable

from tfpar import models
from tfpar.optim import keras_internals

import keras

_SHARE = 0.1
# Why XLA cannot compile such a model on several replicas.
SYNCHRONISED = "the model synchronises batch statistics between replicas, for which TensorFlow has no XLA kernel"


def xla_obstacle(model: keras.Model, *, replicas: int, deterministic: bool) -> str:
    """Why XLA cannot compile a model; empty where it can.

    Args:
      model: A built model.
      replicas: Replicas of all workers.
      deterministic: Whether a repeated run must give the same bits.
    """
    if any(tensor.dtype == "string" for tensor in keras.tree.flatten(getattr(model, "inputs", None) or [])):
        return "the model reads strings, which XLA does not have"
    without = [layer.name for layer in keras_internals.all_layers(model) if not layer.supports_jit]
    if without:
        return f"XLA has no kernels for the layers {', '.join(without)} of the model"
    if replicas > 1 and models.uses_synchronized_statistics(model):
        return SYNCHRONISED
    if deterministic and models.uses_max_pooling(model):
        return "the gradient of the model's max pooling has no deterministic XLA kernel in TensorFlow"
    return ""


def is_convolutional(model: keras.Model, summary: Callable[[], models.ModelSummary | None]) -> bool:
    """Whether convolutions take a large share of the model's FLOPs, or a share that is unknown before it runs.

    The patch embedding of a transformer is below the threshold.

    Args:
      model: The model.
      summary: Returns its size and cost, which may take seconds; None where they are not known before it runs.
    """
    has_some = models.uses_convolutions(model)
    if not has_some and models.is_of_known_layers(model):  # before it is traced
        return False
    known = summary()
    return has_some if known is None else known.convolution_share > _SHARE

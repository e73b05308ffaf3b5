"""Model builders by name, batch normalisation for padded batches, and the cost of a model."""

from __future__ import annotations

import warnings
from typing import Any

# Importing a family registers its builders.
from tfpar.models import convnet, mlp, resnet, transformer_lm, vit  # noqa: F401
from tfpar.models.normalization import BatchNormalization, example_weights, uses_synchronized_statistics
from tfpar.models.registry import TaskSpec, build, check_model, names, options, register
from tfpar.models.summary import (
    ModelSummary,
    PeakFlops,
    describe,
    format_summary,
    is_of_known_layers,
    peak_flops,
    uses_convolutions,
    uses_max_pooling,
)
from tfpar.models.transformer_lm import BitsPerByte

__all__ = [
    "BatchNormalization",
    "BitsPerByte",
    "ModelSummary",
    "PeakFlops",
    "TaskSpec",
    "build",
    "check_model",
    "describe",
    "example_weights",
    "format_summary",
    "is_of_known_layers",
    "names",
    "options",
    "peak_flops",
    "register",
    "uses_convolutions",
    "uses_max_pooling",
    "uses_synchronized_statistics",
]


def __getattr__(name: str) -> Any:
    if name == "check":  # the name of version 0.1.0; version 0.3 removes it
        warnings.warn("tfpar.models.check is deprecated; use check_model", DeprecationWarning, stacklevel=2)
        return check_model
    raise AttributeError(f"module 'tfpar.models' has no attribute {name!r}")

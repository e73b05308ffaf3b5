"""Whether convolutions take a good part of a model's work."""

from __future__ import annotations

from collections.abc import Callable

from tfpar import models

import keras

_SHARE = 0.1


def is_convolutional(model: keras.Model, summary: Callable[[], models.ModelSummary | None]) -> bool:
    """Whether convolutions take a good part of the model's FLOPs, or cannot be told from the rest before it runs.

    Less than that is the patch embedding of a transformer.

    Args:
      model: The model.
      summary: Gives its size and cost, which may take seconds; None where they are not known before it runs.
    """
    has_some = models.uses_convolutions(model)
    if not has_some and models.is_of_known_layers(model):  # before it is traced
        return False
    known = summary()
    return has_some if known is None else known.convolution_share > _SHARE

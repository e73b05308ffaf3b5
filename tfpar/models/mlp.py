"""Multi-layer perceptron over flattened examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.models import common
from tfpar.models.registry import TaskSpec, register

import keras


def _check_options(spec: TaskSpec, options: Mapping[str, Any]) -> None:
    common.check_task(spec, "classification", "mlp")
    common.check_classifier_dtype(spec)
    common.check_options(options)


@register("mlp", check=_check_options)
def mlp(
    spec: TaskSpec,
    *,
    widths: Sequence[int] = (256, 128),
    activation: str = "relu",
    initializer: str = "he_normal",
    normalization: str = "none",
    dropout: float = 0.0,
) -> keras.Model:
    """Dense layers, each followed by normalisation, activation and dropout, then a linear classifier.

    Args:
      spec: A classification task with examples of any shape; they are flattened.
      widths: Units of each hidden layer; an empty list gives a logistic regression.
      activation: One of `common.ACTIVATIONS`.
      initializer: Initialiser of the hidden kernels, one of `common.INITIALIZERS`.
      normalization: One of `common.NORMALIZATIONS`.
      dropout: Rate after every hidden layer.

    Raises:
      ConfigError: The task is not classification, or an option is out of range.
    """
    normalization = common.check_choice("normalization", normalization, common.NORMALIZATIONS)
    rate = common.check_fraction("dropout", dropout)
    inputs, x = common.input_layer(spec)
    x = keras.layers.Flatten(name="flatten")(x)
    for index, width in enumerate(common.check_sizes("widths", widths)):
        x = keras.layers.Dense(
            width,
            use_bias=common.needs_bias(normalization),
            kernel_initializer=common.resolve_initializer(initializer),
            name=f"dense{index}",
        )(x)
        x = common.normalize(x, normalization, f"norm{index}")
        x = common.activate(x, activation, f"activation{index}")
        if rate:
            x = keras.layers.Dropout(rate, name=f"dropout{index}")(x)
    return keras.Model(inputs, common.classifier(x, spec, dropout=0.0))

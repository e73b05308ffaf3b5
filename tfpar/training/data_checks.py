"""Whether data fit a model, found out before step 1."""

from __future__ import annotations

from tfpar import inputs
from tfpar.config import ConfigError

import keras


def check_fits(
    model: keras.Model, train: inputs.Source, validation: inputs.Source | None, *, class_numbers: bool
) -> None:
    """Refuses data that would fail, or be skipped without a word, in the middle of training.

    Args:
      model: A built model.
      train: Training examples.
      validation: Examples to evaluate on, or None.
      class_numbers: Whether the loss reads labels as positions among the model's outputs.

    Raises:
      ConfigError: More classes than outputs, or validation examples of another shape than the training examples.
    """
    outputs = _outputs(model)
    for source in filter(None, (train, validation)):
        info = source.info
        if class_numbers and outputs is not None and info.label_spec.dtype.is_integer and info.num_classes > outputs:
            # On a GPU and under XLA the loss of such a label is NaN: every update that meets one would be skipped.
            raise ConfigError(
                f"{info.name}: the {info.split} labels lie in [0, {info.num_classes}), but the model "
                f"{model.name!r} has {outputs} outputs. Build it with {info.num_classes} outputs, or correct "
                "num_classes of the data."
            )
    if validation is None:
        return
    for what, ours, theirs in (
        ("inputs", train.info.input_spec, validation.info.input_spec),
        ("labels", train.info.label_spec, validation.info.label_spec),
    ):
        if not ours.shape.is_compatible_with(theirs.shape):
            raise ConfigError(
                f"{validation.info.name}: the validation {what} have shape {theirs.shape}, the training {what} "
                f"{ours.shape}. Give validation examples of the training examples' shape."
            )


def _outputs(model: keras.Model) -> int | None:
    """The size of the last dim of the model's only output, or None where it has several or is not a graph of layers."""
    outputs = getattr(model, "outputs", None)
    if not outputs or len(outputs) != 1:
        return None
    return outputs[0].shape[-1]

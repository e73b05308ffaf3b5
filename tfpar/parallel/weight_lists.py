"""`get_weights` and `set_weights` of a model whose variables are divided, as Keras' callbacks call them.

Keras reads and assigns a variable as if all its copies were equal: a callback that restores weights, as `EarlyStopping`
does, would give every device the part of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.optim import keras_internals
from tfpar.parallel.split import assign_whole, copies_of, peers_of, shape_of, split_of, whole_here

import keras
import numpy as np


def list_whole_weights(model: keras.Model) -> None:
    """Makes `model.get_weights` return whole values, which `set_weights` divides again.

    Neither communicates, because a callback may call them on the chief alone. Where several workers have the parts of a
    variable, its value in the list is therefore an array of the parts of this worker's devices.

    Args:
      model: A model with divided variables.
    """
    keras_internals.set_untracked(
        model,
        get_weights=lambda: [_listed(variable) for variable in model.weights],
        set_weights=lambda weights: _set_weights(model, weights),
    )


def _listed(variable: keras.Variable) -> np.ndarray:
    if split_of(variable) is None:
        return np.asarray(variable.numpy())
    return np.stack([copy.numpy() for copy in copies_of(variable)]) if peers_of(variable) else whole_here(variable)


def _set_weights(model: keras.Model, weights: Sequence[np.ndarray]) -> None:
    variables = model.weights
    if len(variables) != len(weights):
        raise ValueError(f"set_weights: model {model.name!r} has {len(variables)} weights, but got {len(weights)}.")
    for variable, value in zip(variables, weights, strict=True):
        copies, shape = copies_of(variable), tuple(np.shape(value))
        of_parts = len(copies), *variable.shape
        if split_of(variable) and peers_of(variable) and shape == of_parts:
            for copy, part in zip(copies, value, strict=True):
                copy.assign(part)
        elif shape == (shape_of(variable) if split_of(variable) else tuple(variable.shape)):
            assign_whole(variable, value)
        else:
            raise ValueError(f"set_weights: {variable.path} has shape {shape_of(variable)}, but got {shape}.")

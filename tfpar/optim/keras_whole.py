"""What is private in Keras (3.15) of optimizers that need whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def needs_whole_tensor(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether a built optimizer, which is not elementwise, must see all of a variable to update it.

    Muon updates embeddings, the output layer and all that is not a matrix as AdamW does.
    """
    return not (isinstance(optimizer, keras.optimizers.Muon) and optimizer._should_use_adamw(variable))


def rows_and_columns(optimizer: keras.optimizers.Optimizer, index: int) -> list[keras.Variable]:
    """State with an element for each row, and for each column, of a weight, if the optimizer is a built Adafactor.

    Args:
      optimizer: Any optimizer.
      index: The place of the weight among those that the optimizer was built with.
    """
    if not isinstance(optimizer, keras.optimizers.Adafactor):
        return []
    # Weights with fewer than two dimensions have scalars there, which are never used.
    return [each[index] for each in (optimizer._r, optimizer._c) if len(each[index].shape)]


def paths_of_rows_and_columns(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> dict[tuple[str, int], str]:
    """The paths that Adafactor's rows and columns have: the last part of a weight's path, so that they repeat.

    Args:
      optimizer: Any optimizer.
      weights: Trainable weights of the model.

    Returns:
      For each unique name, which has the whole path of the weight, and the index of the weight: the path. In the order
      of the optimizer's variables; empty for other optimizers.
    """
    if not isinstance(optimizer, keras.optimizers.Adafactor):
        return {}
    return {
        # The scalars of weights with fewer than two dimensions are made without the name of the optimizer.
        (f"{optimizer.name}/{weight.path.replace('/', '_')}_{attribute}", index): (
            f"{optimizer.name}/{weight.name}" if len(weight.shape) > 1 else weight.name
        )
        for index, weight in enumerate(weights)
        for attribute in ("r", "c")
    }

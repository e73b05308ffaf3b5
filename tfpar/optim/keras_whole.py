"""What is private in Keras (3.15) of optimizers that need whole tensors."""

from __future__ import annotations

import keras


def needs_whole_tensor(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether a built optimizer, which is not elementwise, must see all of a variable to update it.

    Muon updates embeddings, the output layer and all that is not a matrix as AdamW does.
    """
    return not (isinstance(optimizer, keras.optimizers.Muon) and optimizer._should_use_adamw(variable))

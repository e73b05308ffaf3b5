"""Which weights of a model `--shard=weights` divides among the replicas, and which layers gather them."""

from __future__ import annotations

from tfpar.exchange import spec as specs
from tfpar.optim import keras_internals

import keras
import tensorflow as tf


def layers_that_gather(model: keras.Model) -> list[keras.layers.Layer]:
    """The outermost layers that are not models: each gathers its weights when it is called."""
    found = []
    for layer in keras_internals.all_layers(model, include_self=False, recursive=False):
        found += layers_that_gather(layer) if isinstance(layer, keras.Model) else [layer]
    return found


def can_be_sharded(variable: keras.Variable) -> bool:
    """Whether a weight can be sharded and is large enough: at least 1,024 elements and two dimensions."""
    large = specs.parse("none").options.is_compressible(tf.TensorShape(variable.shape))
    return large and variable.dtype == "float32" and variable.constraint is None

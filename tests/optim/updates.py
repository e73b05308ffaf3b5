"""Updates of optimizers on tensors, for tests."""

from __future__ import annotations

from tfpar.optim.pure_update import pure_apply

import keras
import numpy as np
import tensorflow as tf


def matrices_and_vectors(dtype: str = "float32") -> keras.Model:
    """Matrices, vectors, a norm, an embedding and an output: every case the optimizers tell apart."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(7, 6, name="embedding", dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(8, name="hidden", dtype=dtype),
            layers.LayerNormalization(name="norm", dtype=dtype),
            layers.Dense(3, name="logits", dtype=dtype),
        ]
    )


def gradients_of(variables, steps: int = 5):
    generator = np.random.default_rng(0)
    return [[tf.constant(generator.normal(size=v.shape), dtype=v.dtype) for v in variables] for _ in range(steps)]


def values_of(variables):
    return [tf.convert_to_tensor(variable) for variable in variables]


def run_pure(optimizer, params, gradients, *, jit=False, learning_rate=None):
    """Several pure updates. Returns the new parameters and optimizer variables."""
    function = lambda v, p, g: pure_apply(optimizer, v, p, g, learning_rate)  # noqa: E731
    if jit:
        function = tf.function(function, jit_compile=True, autograph=False)
    variables = values_of(optimizer.variables)
    for gradient in gradients:
        params, variables = function(variables, params, gradient)
    return params, variables


def assert_close(actual, expected, rtol=1e-6):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), e.numpy(), rtol=rtol, atol=1e-7 if a.dtype == "float32" else 1e-12)

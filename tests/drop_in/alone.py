"""A process that stands for one of several workers, and what it trains."""

from __future__ import annotations

import json
import pathlib

import tfpar

import keras
import numpy as np
import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[2]
TWO_WORKERS = {"cluster": {"worker": ["127.0.0.1:20001", "127.0.0.1:20002"]}, "task": {"type": "worker", "index": 1}}
X = np.random.default_rng(0).standard_normal((24, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def model_of() -> keras.Model:
    # No bias before a normalisation: its gradient is zero but for rounding, which another order of threads changes.
    hidden = keras.layers.Dense(4, use_bias=False)
    return keras.Sequential([keras.Input((3,)), hidden, keras.layers.BatchNormalization(), keras.layers.Dense(1)])


class Alone:
    """Stands for the workers of a cluster, and answers for the others."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        self.others: list = []

    def gather(self, what, value):
        del what
        others = [other(value) for other in self.others]
        return json.loads(json.dumps([value, *others]))

    def broadcast(self, arrays):
        return arrays


def fit(alone, optimizer=None, callback=tfpar.BroadcastInitialWeights, model=None, data=(X, Y), **keywords):
    model = model or model_of()
    model.compile(optimizer or tfpar.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
    return model.fit(*data, verbose=0, callbacks=[callback()], **keywords)

"""Plain Keras `fit` under MultiWorkerMirroredStrategy: what Keras 3.15 cannot do."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)

"""A plain Keras script, and what takes it to several workers: the lines with `tfpar`.

python -m tfpar.launch --workers=2 -- experiments/keras_fit.py
"""

from __future__ import annotations

import tfpar

import keras
from sklearn import datasets, model_selection

EPOCHS = 10
BATCH_SIZE = 32  # of each worker


def main() -> None:
    tfpar.init_cluster()  # before anything of Keras or TensorFlow is made
    keras.utils.set_random_seed(0)
    x, y = datasets.load_digits(return_X_y=True)
    x, x_test, y, y_test = model_selection.train_test_split(x / 16.0, y, test_size=0.2, random_state=0)
    x, y = tfpar.shard(x, y)  # every worker trains on its share, and evaluates on its share
    x_test, y_test = tfpar.shard(x_test, y_test)

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    optimizer = tfpar.DistributedOptimizer(keras.optimizers.Adam(3e-3), exchange="int4")
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    callbacks = [
        tfpar.BroadcastInitialWeights(),
        tfpar.AverageMetrics(),  # before the callbacks that read the metrics
        keras.callbacks.ReduceLROnPlateau(patience=2),
    ]
    first = tfpar.rank() == 0
    if first:
        callbacks.append(keras.callbacks.ModelCheckpoint("runs/keras_fit.keras", save_best_only=True))
    model.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        validation_data=(x_test, y_test),
        callbacks=callbacks,
        verbose=2 if first else 0,
    )


if __name__ == "__main__":
    main()

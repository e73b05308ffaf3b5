"""A plain Keras script that classifies digits; the lines with `tfpar` distribute it over several workers.

python -m tfpar.launch --workers=2 -- experiments/keras_fit.py

It has no options: change the script. It writes its best model to runs/keras_fit.keras.
"""
# docs/keras.md shows the body of `main`, README.md its essential lines; tests/drop_in/test_drop_in.py compares them.

from __future__ import annotations

import argparse

import tfpar


def main() -> None:
    import keras  # here, so that --help need not wait for TensorFlow
    from sklearn import datasets, model_selection

    tfpar.init_cluster()  # before Keras or TensorFlow makes anything
    keras.utils.set_random_seed(0)
    x, y = datasets.load_digits(return_X_y=True)
    x, x_test, y, y_test = model_selection.train_test_split(x / 16.0, y, test_size=0.2, random_state=0)
    x, y = tfpar.shard(x, y)  # every size()-th example, from the rank()-th
    x_test, y_test = tfpar.shard(x_test, y_test)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    optimizer = tfpar.DistributedOptimizer(keras.optimizers.Adam(3e-3), exchange="int4")
    # jit_compile: XLA cannot run collectives.
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    callbacks = [
        tfpar.BroadcastInitialWeights(),  # all start from worker 0's weights and optimizer state
        tfpar.AverageMetrics(),  # before the callbacks that read metrics: all workers decide the same
        keras.callbacks.ReduceLROnPlateau(patience=2),
    ]
    if tfpar.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint("runs/keras_fit.keras", save_best_only=True))
    verbose = 2 if tfpar.rank() == 0 else 0
    model.fit(x, y, batch_size=32, epochs=10, validation_data=(x_test, y_test), callbacks=callbacks, verbose=verbose)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()

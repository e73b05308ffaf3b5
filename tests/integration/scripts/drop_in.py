"""One worker of tests/integration/test_drop_in.py: fits plain Keras models, and misuses the drop-in, in one process.

python tests/integration/scripts/drop_in.py OUTPUT_DIR
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import tfpar
from tfpar.drop_in import optimizer

import keras
import numpy as np
import tensorflow as tf

BATCH, STEPS, EPOCHS = 8, 5, 4  # BATCH is that of one of two workers; an even number of steps in all
ROWS = 500  # of an embedding of which a batch touches few
OVERFLOW = 37  # the example that makes a gradient overflow


def data() -> tuple[np.ndarray, np.ndarray]:
    """Examples of all workers."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2 * BATCH * STEPS, 6)).astype(np.float32)
    return x, (x[:, :3].sum(axis=1, keepdims=True) + 0.1 * generator.standard_normal((len(x), 1))).astype(np.float32)


def dense_model(seed: int = 0, width: int = 64, dtype: str = "float32") -> keras.Model:
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(width, activation="tanh", dtype=dtype),
            keras.layers.Dense(32, activation="tanh", dtype=dtype),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )


def embedding_model(vocabulary: int = 11) -> keras.Model:
    """With IndexedSlices for a gradient, and a weight without one."""

    class Unused(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.unused = self.add_weight(shape=(3, 2), name="unused")

        def call(self, inputs: Any) -> Any:
            return inputs

    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    tokens = keras.layers.Lambda(lambda x: tf.cast(tf.abs(x) * 40.0, tf.int32) % vocabulary)(inputs)
    hidden = Unused()(keras.layers.Flatten()(keras.layers.Embedding(vocabulary, 4)(tokens)))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def overflowing() -> tuple[np.ndarray, np.ndarray]:
    x, y = data()
    x[OVERFLOW] = np.inf
    return x, y


SCHEDULE = {"initial_learning_rate": 0.05, "decay_steps": 4, "decay_rate": 0.5}
# Name: model, optimizer, keywords of compile, data. Each must come out as on one process with the joint batch.
FITS: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any], dict[str, Any], Callable[[], Any]]] = {
    "clipped": (
        dense_model,
        lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(**SCHEDULE), global_clipnorm=0.02, weight_decay=0.1
        ),
        {},
        data,
    ),
    "accumulated": (
        dense_model,
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05, gradient_accumulation_steps=2, use_ema=True),
        {"steps_per_execution": 2},
        data,
    ),
    "loss_scaled": (
        dense_model,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0),
        {},
        overflowing,
    ),
    "mixed_float16": (
        lambda: dense_model(dtype="mixed_float16"),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0),
        {},
        overflowing,
    ),
    "indexed": (embedding_model, lambda: keras.optimizers.SGD(0.1, momentum=0.9), {"run_eagerly": True}, data),
    "rows": (
        lambda: embedding_model(ROWS),
        lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
        {"steps_per_execution": 2},
        data,
    ),
    "rows_scaled": (
        lambda: embedding_model(ROWS),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0),
        {},
        data,
    ),
    "rows_accumulated": (
        lambda: embedding_model(ROWS),
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        {},
        data,
    ),
}


def fit(name: str, batch: int, exchange: str = "none", sent: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """Trains, on several workers or on one, and returns weights, optimizer variables and the logs of the epochs.

    Args:
      name: Of `FITS`.
      batch: Examples of a worker.
      exchange: Of the gradients.
      sent: Gets the bytes that a worker sends in a step, and what they would be dense.
    """
    build, make, keywords, examples = FITS[name]
    model = build()
    model.compile(tfpar.DistributedOptimizer(make(), exchange), "mse", metrics=["mae"], jit_compile=False, **keywords)
    x, y = examples()
    held = tfpar.shard(x[:30], y[:30])
    x, y = tfpar.shard(x, y)
    history = model.fit(
        x,
        y,
        batch_size=batch,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[tfpar.BroadcastInitialWeights(), tfpar.AverageMetrics()],
        validation_data=held,
    )
    distribution = optimizer.distribution_of(model.optimizer)
    if sent is not None and distribution is not None:
        traffic = distribution._exchange.traffic(2, 0)
        sent |= {name: traffic.wire_bytes, f"{name}, dense": traffic.dense_bytes}
    return state(model) | {f"log/{key}": np.array(values) for key, values in history.history.items()}


class OwnStep(keras.Model):
    """A model whose step returns tensors, and updates no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            kl = tf.reduce_mean(x**2)
            loss = tf.reduce_mean((self(x) - y) ** 2) + kl
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss, "kl_loss": kl}


def own_step() -> dict[str, np.ndarray]:
    """What this worker would log, and what all log."""
    keras.utils.set_random_seed(0)
    model, own = OwnStep(), []
    x, y = tfpar.shard(*data())
    model(x)
    model.compile(tfpar.DistributedOptimizer(keras.optimizers.SGD(0.01)), jit_compile=False)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(dict(logs)))
    callbacks = [tfpar.BroadcastInitialWeights(), note, tfpar.AverageMetrics()]
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    noted = {f"own/{name}": np.array([logs[name] for logs in own]) for name in own[0]}
    return noted | {f"log/{name}": np.array(values) for name, values in history.history.items()}


class Gan(keras.Model):
    """As in the examples of Keras: with two optimizers, neither of which is the argument of `Model.compile`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        keras.utils.set_random_seed(seed)
        hidden = keras.layers.Dense(8, activation="tanh")
        self.discriminator = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(1)])
        hidden = keras.layers.Dense(8, activation="tanh")
        self.generator = keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(6)])
        self.d_loss, self.g_loss = keras.metrics.Mean("d_loss"), keras.metrics.Mean("g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile(jit_compile=False)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.d_loss, self.g_loss]

    def train_step(self, real: Any) -> dict[str, Any]:
        latent, ones = real[:, :3], tf.ones_like(real[:, :1])
        with tf.GradientTape() as tape:
            logits = self.discriminator(tf.concat([real, self.generator(latent)], axis=0))
            d_loss = self.loss_fn(tf.concat([ones, 0.0 * ones], axis=0), logits)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ones, self.discriminator(self.generator(latent)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def gan(batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights, optimizer variables and logs of a GAN, which begins with the weights of worker 0."""
    model = Gan(seed)
    optimizers = [tfpar.DistributedOptimizer(make) for make in (keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01))]
    model.compile(*optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    x = tfpar.shard(data()[0])
    callbacks = [tfpar.BroadcastInitialWeights(), tfpar.AverageMetrics()]
    history = model.fit(x, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    result = {f"weight/{index}": value for index, value in enumerate(model.get_weights())}
    variables = [variable for one in optimizers for variable in one.variables]
    result |= {f"slot/{index}": variable.numpy() for index, variable in enumerate(variables)}
    return result | {f"log/{name}": np.array(values) for name, values in history.history.items()}


def resumed(directory: pathlib.Path, stop: int) -> dict[str, np.ndarray]:
    """The weights and optimizer variables of four epochs, ended after some of them and started again.

    Args:
      directory: Of this worker's backups.
      stop: The epoch at whose end the first start ends.
    """

    class EndedError(Exception):
        """Something ended `fit`."""

    def end(epoch: int, logs: Any) -> None:
        if epoch + 1 == stop:
            raise EndedError

    x, y = tfpar.shard(*data())
    for start in range(2):
        model = dense_model(seed=7 * start)
        model.compile(tfpar.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile=False)
        callbacks = [tfpar.BroadcastInitialWeights(), keras.callbacks.BackupAndRestore(str(directory))]
        callbacks += [] if start else [keras.callbacks.LambdaCallback(on_epoch_end=end)]
        with contextlib.suppress(EndedError):
            model.fit(x, y, batch_size=BATCH, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
            break
    return state(model)


def state(model: keras.Model) -> dict[str, np.ndarray]:
    result = {f"weight/{index}": value for index, value in enumerate(model.get_weights())}
    return result | {f"slot/{index}": value.numpy() for index, value in enumerate(model.optimizer.variables)}


def compressed(rank: int, directory: pathlib.Path) -> dict[str, np.ndarray]:
    """int4, from other weights on every worker, with callbacks that decide from the metrics; inside conds and loops."""
    model = dense_model(seed=rank)
    before = model.get_weights()
    adam = keras.optimizers.Adam(0.02, gradient_accumulation_steps=2)
    model.compile(tfpar.DistributedOptimizer(adam, "int4"), "mse", jit_compile=False, steps_per_execution=3)
    x, y = tfpar.shard(*data())
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).shuffle(99, seed=rank).batch(BATCH),
        epochs=40,
        verbose=0,
        validation_data=(x[: 5 + 9 * rank], y[: 5 + 9 * rank]),
        callbacks=[
            tfpar.BroadcastInitialWeights(),
            tfpar.AverageMetrics(),
            keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=0, min_delta=0.05),
        ],
    )
    own = {"own/val_loss": np.array(model.evaluate(x[: 5 + 9 * rank], y[: 5 + 9 * rank], verbose=0))}
    if rank == 0:
        model.save(directory / "int4.keras")
    logs = {f"log/{key}": np.array(values) for key, values in history.history.items()}
    return state(model) | logs | own | {"before": before[0]}


def misuses(rank: int) -> dict[str, Callable[[], Any]]:
    """What every worker must refuse, by name: nobody is left waiting, so that they can go on with the next."""
    x, y = tfpar.shard(*data())

    def run(
        model: keras.Model | None = None,
        sgd: Any = "sgd",
        exchange: str = "none",
        callbacks: Any = None,
        examples: int = len(x),
        jit_compile: bool = False,
        **keywords: Any,
    ) -> None:
        model = model or dense_model()
        distributed = tfpar.DistributedOptimizer(keras.optimizers.get(sgd), exchange)
        model.compile(distributed, "mse", jit_compile=jit_compile)
        callbacks = [tfpar.BroadcastInitialWeights(), tfpar.AverageMetrics()] if callbacks is None else callbacks
        keywords = {"batch_size": BATCH, "verbose": 0, "shuffle": False} | keywords
        model.fit(x[:examples], y[:examples], callbacks=callbacks, **keywords)

    late = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 + rank * epoch), tfpar.AverageMetrics()

    def stop(epoch: int, logs: Any) -> None:
        stopping.model.stop_training = epoch + rank == 2

    stopping = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    return {
        "xla": lambda: run(jit_compile=True),
        "xla, no callback": lambda: run(jit_compile=True, callbacks=[]),
        "other model": lambda: run(model=dense_model(width=32 + rank)),
        "other model, no callback": lambda: run(model=dense_model(width=32 + rank), callbacks=[]),
        "other exchange": lambda: run(exchange=("int4", "int8")[rank]),
        "other optimizer": lambda: run(sgd=keras.optimizers.SGD(momentum=0.5 + 0.1 * rank)),
        "other weights": lambda: run(model=dense_model(seed=rank), callbacks=[]),
        "other optimizer variables": lambda: run(sgd=keras.optimizers.SGD(0.1 + rank), callbacks=[]),
        "other callbacks": lambda: run(callbacks=[(tfpar.BroadcastInitialWeights, tfpar.AverageMetrics)[rank]()]),
        "other end": lambda: run(callbacks=[tfpar.BroadcastInitialWeights(), stopping], epochs=5),
        "other steps": lambda: run(examples=len(x) - BATCH * rank),
        "other learning rates": lambda: run(callbacks=late, epochs=3),
        "other first epoch": lambda: run(initial_epoch=rank, epochs=3),
        "a variable is left out": leave_out,
        "a layer is unfrozen": unfreeze,
    }


def unfreeze() -> None:
    model, sgd = dense_model(), tfpar.DistributedOptimizer(keras.optimizers.SGD())
    x, y = tfpar.shard(*data())
    for trainable in (False, True):
        model.layers[0].trainable = trainable
        model.compile(sgd, "mse", jit_compile=False)
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[tfpar.BroadcastInitialWeights()])


def lone_gradients(rank: int) -> dict[str, np.ndarray]:
    """A gradient that worker 1 no longer has after the first step."""
    variables = [keras.Variable(np.ones(2, np.float32), name=name) for name in "ab"]
    distributed = tfpar.DistributedOptimizer(keras.optimizers.SGD(0.5))
    distributed.build(variables)
    one = tf.ones(2)
    distributed.apply([one, one], variables)
    distributed.apply([one, one if rank == 0 else None], variables)
    return {variable.name: variable.numpy() for variable in variables}


def evaluated(batch: int) -> dict[str, np.ndarray]:
    """The logs of epochs at whose end another callback evaluates the model, before the averages, without validation.

    Args:
      batch: Examples of a worker.
    """
    model = dense_model()
    model.compile(tfpar.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"], jit_compile=False)
    x, y = tfpar.shard(*data())
    evaluate = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.evaluate(x[:3], y[:3], verbose=0))
    callbacks = [tfpar.BroadcastInitialWeights(), evaluate, tfpar.AverageMetrics()]
    history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return {name: np.array(values) for name, values in history.history.items()}


def late_gradients(rank: int, step: Callable[[Callable[[], None]], Callable[[], None]]) -> dict[str, Any]:
    """Gradients that come after the first step: on both workers, on neither, then on worker 0 alone.

    Args:
      rank: Of this worker.
      step: `tf.function`, or nothing of the kind.
    """
    variables = [keras.Variable(np.ones(2, np.float32), name=name) for name in "abc"]
    distributed = tfpar.DistributedOptimizer(keras.optimizers.SGD(0.5))
    distributed.build(variables)
    one = tf.ones(2)
    for gradients in ([one, None, None], [None, one, None], [one, None, None]):
        step(lambda gradients=gradients: distributed.apply(gradients, variables))()
    result: dict[str, Any] = {"together": [variable.numpy().tolist() for variable in variables]}
    try:
        step(lambda: distributed.apply([one, one, None if rank else one], variables))()
    except (tfpar.ConfigError, tf.errors.InvalidArgumentError) as error:
        result["refused"] = str(error)
    return result | {"after": [variable.numpy().tolist() for variable in variables]}


def leave_out() -> None:
    variables = [keras.Variable(np.ones((64, 64), np.float32), name=name) for name in "ab"]
    distributed = tfpar.DistributedOptimizer(keras.optimizers.SGD(0.5), "int8")
    distributed.build(variables)
    distributed.apply([tf.ones((64, 64))] * 2, variables)
    distributed.apply([tf.ones((64, 64))], variables[1:])


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    tfpar.init_cluster()
    rank = tfpar.rank()
    optimizer._DENSE_BYTES = 4000  # several collectives for `none`
    sent: dict[str, int] = {}
    for name in FITS:
        np.savez(directory / f"{name}-{rank}.npz", **fit(name, BATCH, sent=sent))
    np.savez(directory / f"rows_int8-{rank}.npz", **fit("rows", BATCH, "int8:min_elements=100"))
    (directory / f"sent-{rank}.json").write_text(json.dumps(sent))
    np.savez(directory / f"int4-{rank}.npz", **compressed(rank, directory))
    np.savez(directory / f"lone-{rank}.npz", **lone_gradients(rank))
    np.savez(directory / f"evaluated-{rank}.npz", **evaluated(BATCH))
    np.savez(directory / f"own_step-{rank}.npz", **own_step())
    np.savez(directory / f"gan-{rank}.npz", **gan(BATCH, seed=rank))
    for name, stop in (("resumed", 2), ("uninterrupted", 9)):
        np.savez(directory / f"{name}-{rank}.npz", **resumed(directory / f"backup-{name}-{rank}", stop))
    late = {"eager": late_gradients(rank, lambda step: step), "graph": late_gradients(rank, tf.function)}
    (directory / f"late-{rank}.json").write_text(json.dumps(late))
    refusals = {}
    for name, misuse in misuses(rank).items():
        try:
            misuse()
            refusals[name] = "nothing was refused"
        except tfpar.ConfigError as error:
            refusals[name] = str(error)
        except Exception as error:
            refusals[name] = f"{type(error).__name__}: {error}"
    (directory / f"refusals-{rank}.json").write_text(json.dumps(refusals))


if __name__ == "__main__":
    main()
